import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import api
from jobs.broker import broker_status, broker_url
from jobs.job import Job
from jobs.local_worker import LocalWorker
from jobs.queue import Queue
from jobs.wait import RateMeter, Snapshot, Waiter
from schemas.errors import EngineError
from schemas.records import JobState, RowStatus
from schemas.settings import Settings
from tests.jobs.verbs import HandWorker, Machine, commit

DIES = (sys.executable, "-c", 'import sys; print(\'{"level": "error", "reason": "no luck"}\'); sys.exit(1)')
REFUSES = (sys.executable, "-c", "print('bad model'); raise SystemExit(2)")
STAYS = (sys.executable, "-c", "import signal; signal.pause()")


class Notebook:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.notes: list[str] = []
        self.is_closed = False

    def update(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.is_closed = True


class Finisher(Notebook):
    """Does the work itself after a few looks."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    def update(self, snapshot: Snapshot) -> None:
        super().update(snapshot)
        if len(self.snapshots) == 4:
            commit(self._job, [0, 1, 2])


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def queued_job(machine: Machine, num_rows: int = 12) -> Job:
    assert machine.submit(machine.write_rows(num_rows), "--no-wait", "--chunk-rows", "4").exit_code == 0
    return machine.job()


def wait(
    machine: Machine, job: Job, command: tuple[str, ...] | None = None, **worker: Any
) -> tuple[JobState, Notebook]:
    notebook = Notebook()
    settings = Settings(state_dir=machine.settings.state_dir, worker={"reconcile_interval_s": 0.1, **worker})  # type: ignore[arg-type]
    local = None if command is None else LocalWorker(settings, job.spec.model, command)
    return Waiter(job, machine.queue, settings, notebook, local).run(), notebook


def test_a_wait_ends_with_the_last_part_and_writes_the_output(machine: Machine) -> None:
    job = queued_job(machine)
    HandWorker(machine).start()
    state, notebook = wait(machine, job)
    assert state is JobState.DONE
    assert notebook.is_closed
    assert notebook.snapshots[-1].counts == {RowStatus.OK: 12}
    assert [s.num_done for s in notebook.snapshots] == sorted(s.num_done for s in notebook.snapshots)


def test_running_rows_count_before_they_are_committed(machine: Machine) -> None:
    job = queued_job(machine)
    commit(job, [0])
    machine.queue.progress(job.job_id, 1, {RowStatus.OK: 2, RowStatus.INVALID: 1})
    job.cancel()
    state, notebook = wait(machine, job)
    assert state is JobState.CANCELLED
    last = notebook.snapshots[-1]
    assert (last.num_done, last.num_ok, last.num_running) == (7, 6, 1)


def test_a_flushed_broker_gets_the_chunks_back(machine: Machine) -> None:
    job = queued_job(machine)
    machine.queue._redis.flushall()
    HandWorker(machine).start()
    assert wait(machine, job)[0] is JobState.DONE


def test_a_lost_broker_is_told_once_and_the_wait_goes_on(machine: Machine) -> None:
    job = queued_job(machine)
    machine.close()
    queue = Queue(machine.settings, "redis://127.0.0.1:1/0")

    notebook = Finisher(job)
    settings = Settings(state_dir=machine.settings.state_dir, broker_url=queue.broker_url)
    assert Waiter(job, queue, settings, notebook, None).run() is JobState.DONE
    (note,) = notebook.notes
    assert "waiting for the broker" in note


def test_a_killed_embedded_broker_is_started_again(machine: Machine) -> None:
    job = queued_job(machine)
    machine.close()

    worker = LocalWorker(machine.settings, job.spec.model, STAYS)
    queue = Queue(machine.settings, broker_url(machine.settings))
    assert Waiter(job, queue, machine.settings, Finisher(job), worker).run() is JobState.DONE
    assert broker_status(machine.settings).pid is not None


def test_a_worker_that_keeps_dying_is_an_error_with_its_last_words(machine: Machine) -> None:
    job = queued_job(machine)
    with pytest.raises(EngineError, match=r"no luck\nits log .*worker-nightmill.*\.log ends with") as caught:
        wait(machine, job, DIES)
    assert str(caught.value).count('"level"') >= 3
    assert job.state() is JobState.FAILED
    assert "the worker cannot go on: no luck\n" in machine.run("status").stdout
    assert machine.run("resume", job.job_id, "--no-wait").exit_code == 0
    assert job.state() is JobState.QUEUED


def test_a_worker_that_refuses_its_model_is_started_once(machine: Machine) -> None:
    with pytest.raises(EngineError, match="exit code 2") as caught:
        wait(machine, queued_job(machine), REFUSES)
    assert str(caught.value).count("bad model") == 1


def test_the_worker_is_stopped_whatever_ends_the_wait(machine: Machine) -> None:
    job = queued_job(machine)
    worker = LocalWorker(machine.settings, job.spec.model, STAYS)

    class Fuse(Notebook):
        def update(self, snapshot: Snapshot) -> None:
            if worker.is_running():
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Waiter(job, machine.queue, machine.settings, Fuse(), worker).run()
    assert not worker.is_running()


def test_a_served_queue_gets_no_second_worker(machine: Machine) -> None:
    job = queued_job(machine)
    HandWorker(machine).run()
    state, notebook = wait(machine, job, DIES)
    assert (state, notebook.notes) == (JobState.DONE, [])


def test_functions_do_what_the_verbs_do(machine: Machine) -> None:
    submission = api.Submission(
        inputs=(machine.write_rows(8),), prompt_column="text", model=str(machine.model), chunk_rows=4
    )
    prepared = api.prepare(submission, machine.settings)
    assert machine.job_ids() == []
    job = api.submit(prepared, machine.settings)
    commit(job, [0, 1])
    assert api.wait(job, machine.settings) is JobState.DONE


def test_the_rate_is_unknown_while_nothing_comes_in() -> None:
    meter = RateMeter()
    assert [meter.measure(second, 0) for second in (0.0, 50.0, 100.0)] == [None, None, None]
    assert meter.measure(101.0, 10) == pytest.approx(10.0), "loading the model is not slowness"


@given(st.floats(0.5, 1000), st.integers(2, 400))
def test_a_steady_rate_is_measured_as_it_is(rate: float, num_samples: int) -> None:
    meter = RateMeter()
    measured = [meter.measure(float(second), round(1000 * rate * second)) for second in range(num_samples)]
    assert measured[-1] == pytest.approx(1000 * rate, rel=0.01)


def test_an_old_slow_time_is_forgotten() -> None:
    meter = RateMeter()
    for second in range(200):
        meter.measure(float(second), second)
    for second in range(200, 300):
        rate = meter.measure(float(second), 200 + 50 * (second - 200))
    assert rate == pytest.approx(50.0)
