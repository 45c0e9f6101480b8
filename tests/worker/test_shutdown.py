import contextlib
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.worker.lab import Lab, Worker, until


@pytest.fixture
def busy(lab: Lab) -> Worker:
    """A worker with two running chunks and two more in the queue."""
    worker = lab.worker()
    lab.start_job(4, seconds=60)
    until(lambda: len(lab.events("submitted")) == 2, "both slots to be busy")
    return worker


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_one_polite_signal_lets_running_chunks_end_and_leaves_the_rest_queued(
    lab: Lab, number: int, exit_code: int
) -> None:
    worker = lab.worker()
    job = lab.start_gated_job(4)
    until(lambda: len(lab.events("submitted")) == 2, "both slots to be busy")
    worker.signal(number)
    until(lambda: "Warm shutdown" in worker.log, "the warm shutdown to begin")
    lab.gate.touch()
    assert worker.wait() == exit_code
    assert len(job.committed()) == 2
    assert lab.leftovers() == {"queued": 2, "unacked": 0, "index": 0}


def test_sigterm_gives_chunks_back_that_do_not_end_within_the_drain_time(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(drain_s=0.5)
    worker = lab.worker()
    job = lab.start_job(4, seconds=60)
    until(lambda: len(lab.events("submitted")) == 2, "both slots to be busy")
    engines = worker.engine_pids()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert lab.leftovers() == {"queued": 4, "unacked": 0, "index": 0}
    assert not job.committed()
    assert not any(map(psutil.pid_exists, engines))
    assert lab.redis.keys("nightmill:deliveries:*") == [], "a chunk that was given back has not failed"


def test_sigquit_gives_chunks_back_at_once(lab: Lab, busy: Worker) -> None:
    engines = busy.engine_pids()
    busy.signal(signal.SIGQUIT)
    busy.wait()
    assert lab.leftovers() == {"queued": 4, "unacked": 0, "index": 0}
    assert not any(map(psutil.pid_exists, engines))


def test_sigquit_cuts_a_warm_shutdown_short(lab: Lab, busy: Worker) -> None:
    busy.signal(signal.SIGTERM)
    until(lambda: "Warm shutdown" in busy.log, "the warm shutdown to begin")
    busy.signal(signal.SIGQUIT)
    busy.wait()
    assert lab.leftovers() == {"queued": 4, "unacked": 0, "index": 0}


def test_two_interrupts_as_from_a_terminal_give_chunks_back(lab: Lab, busy: Worker) -> None:
    busy.signal(signal.SIGINT)
    until(lambda: "initiate cold shutdown" in busy.log, "the first interrupt to be seen")
    busy.signal(signal.SIGINT)
    busy.wait()
    assert lab.leftovers() == {"queued": 4, "unacked": 0, "index": 0}


def engine_of(worker: Worker) -> psutil.Process | None:
    """The engine that never loads; libraries start children of their own, which are gone at once."""
    for child in psutil.Process(worker.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "Stop" in " ".join(child.cmdline()):
                return child
    return None


def test_sigterm_while_the_model_loads_ends_the_worker_at_once(lab: Lab) -> None:
    (lab.path / "never-loads").touch()
    worker = lab.worker(is_ready=False)
    engine = until(lambda: engine_of(worker), "the engine to be started")
    until(lambda: lab.queue.workers_serving(lab.model.queue) == 1, "a loading worker to be counted")
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert not engine.is_running()


def test_a_revoked_chunk_stops_and_frees_its_slot(lab: Lab) -> None:
    from worker.celery import make_app

    lab.worker()
    job = lab.start_job(1, seconds=60)
    until(lambda: lab.events("submitted"), "the chunk to run")
    control = make_app(lab.settings).control
    (active,) = control.inspect(timeout=5, limit=1).active().values()
    control.revoke(active[0]["id"], terminate=True)
    lab.wait_clean()
    assert not job.committed()
    lab.wait_done(lab.start_job(2, name="next"))


def test_a_cancelled_job_stops_soon_and_its_messages_are_used_up(lab: Lab) -> None:
    lab.worker()
    job = lab.start_job(5, seconds=3600)
    until(lambda: len(lab.events("submitted")) == 2, "both slots to be busy")
    job.cancel()
    lab.wait_clean()
    assert not job.committed()
    job.uncancel()
    assert lab.queue.reconcile(job) == 5
