import os
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest

from jobs.broker import broker_status
from jobs.local_worker import PERMANENT_EXIT_CODE
from jobs.queue import list_keys
from jobs.thresholds import Thresholds
from schemas.errors import SettingsError
from schemas.records import JobState, Priority, RetryPolicy, RowStatus
from schemas.settings import Settings
from tests.tiny_jobs import YES_NO
from tests.worker.lab import ROOT, Lab, until
from worker.celery import make_app
from worker.consumer import LOSSY_OPTIONS, LOSSY_SETTINGS, refuse_lossy_settings
from worker.pool import EnginePool


def test_a_worker_runs_a_job_to_its_end_and_leaves_nothing_behind(lab: Lab) -> None:
    worker = lab.worker()
    job = lab.start_job(6)
    lab.wait_done(job)
    lab.wait_clean()
    until(lambda: job.state() == JobState.DONE, "the worker to finish the job")
    engines = worker.engine_pids()
    assert len(engines) == 1
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert not any(map(psutil.pid_exists, engines))
    assert set(lab.count("leased").values()) == {1}
    chunks = job.provenances()
    assert [(chunk.device, chunk.num_asked, chunk.kernels[0][1]) for chunk in chunks] == [("fake", 1, "fake")] * 6
    assert all(str(worker.pid) in chunk.worker and chunk.versions["celery"] for chunk in chunks)
    success = job.success()
    assert success is not None
    assert success.throughput is not None
    assert (success.throughput.num_asked, success.throughput.num_workers) == (6, 1)
    assert success.throughput.busy_s <= chunks[-1].finished_s - chunks[0].started_s
    assert lab.queue.workers_serving(lab.model.queue) == 0
    assert lab.redis.keys("nightmill:lease:*") == lab.redis.keys("nightmill:progress:*") == []


def test_a_worker_stops_a_job_in_which_too_many_rows_fail(lab: Lab) -> None:
    thresholds = Thresholds(max_share={RowStatus.INVALID: 0.5}, min_rows=2)
    job = lab.job(20, seconds=0.1, constraint=YES_NO, retry=RetryPolicy(max_attempts=1), thresholds=thresholds)
    lab.queue.enqueue(job, job.pending())
    lab.worker()
    until(lambda: job.state() is JobState.FAILED, "the job to be aborted")
    lab.wait_clean()
    failure = job.failure()
    assert failure is not None
    assert "are invalid, the limit is 50.0%" in failure.cause
    assert 2 <= len(job.committed()) < 6  # what ran beside it may have come in


def test_the_other_chunks_wait_until_the_canary_was_found_good(lab: Lab) -> None:
    job = lab.job(6, thresholds=Thresholds(max_share={RowStatus.INVALID: 0.5}, canary_rows=1))
    assert job.pending() == (0,)
    lab.queue.enqueue(job, job.pending())
    lab.worker()
    until(lambda: job.state() is JobState.DONE, "the whole job")
    assert lab.events("leased")[0]["chunk"] == 0
    committed, first = lab.events("committed")[0], lab.events("leased")[1]
    assert committed["chunk"] == 0
    assert committed["at_s"] <= first["at_s"]


def test_a_bad_canary_stops_the_job_though_it_is_one_row_and_resume_goes_on(lab: Lab) -> None:
    thresholds = Thresholds(max_share={RowStatus.INVALID: 0.5}, canary_rows=1)
    job = lab.job(6, constraint=YES_NO, retry=RetryPolicy(max_attempts=1), thresholds=thresholds)
    lab.queue.enqueue(job, job.pending())
    lab.worker()
    until(lambda: job.state() is JobState.FAILED, "the job to be aborted")
    lab.wait_clean()
    assert job.committed() == {0}
    assert job.pending() == (1, 2, 3, 4, 5)
    job.lift_limits()
    lab.queue.reconcile(job)
    lab.wait_done(job)


def test_a_worker_serves_only_its_model_s_queue(lab: Lab) -> None:
    ours, theirs = lab.job(2), lab.job(2, name="theirs", model=lab.other_model())
    for job in (theirs, ours):
        lab.queue.enqueue(job, job.pending())
    lab.worker()
    lab.wait_done(ours)
    lab.wait_clean()
    assert lab.queue.depth(theirs.spec.model.queue) == len(theirs.pending()) == 2
    assert lab.queue.workers_serving(ours.spec.model.queue) == 1
    assert lab.queue.workers_serving(theirs.spec.model.queue) == 0


def test_a_report_is_there_when_a_job_has_ended(lab: Lab) -> None:
    lab.environment["NIGHTMILL_JOBS__REPORT"] = "true"
    lab.worker()
    job = lab.start_job(2)
    lab.wait_done(job)
    until(lambda: "report.html" in job.store.list(), "the report")
    assert job.job_id.encode() in job.store.read("report.html")


def test_an_interactive_job_overtakes_a_nightly_one_at_the_next_chunk(lab: Lab) -> None:
    lab.worker()
    nightly = lab.start_gated_job(4, name="nightly", priority=Priority.NIGHTLY)
    until(lambda: len(lab.events("submitted")) == 2, "both slots to work for the night")
    interactive = lab.start_job(2, name="interactive")
    lab.gate.touch()
    until(lambda: len(lab.events("received")) >= 5, "the night to go on")
    order = [event["job"] for event in lab.events("received")][:5]
    assert order == [nightly.job_id] * 2 + [interactive.job_id] * 2 + [nightly.job_id]
    assert not interactive.pending()


def test_messages_that_go_back_keep_their_priority(lab: Lab) -> None:
    worker = lab.worker()
    lab.start_job(3, seconds=30, priority=Priority.NIGHTLY)
    until(lambda: len(lab.events("submitted")) == 2, "both slots to be busy")
    worker.signal(signal.SIGQUIT)
    worker.wait()
    assert [lab.redis.llen(key) for key in list_keys(lab.model.queue)] == [0, 3]


def test_inspect_answers_while_the_worker_is_busy_and_shows_the_engine(lab: Lab) -> None:
    worker = lab.worker()
    lab.start_job(2, seconds=30)
    until(lambda: lab.events("submitted"), "a chunk to run")
    (stats,) = make_app(lab.settings).control.inspect(timeout=5, limit=1).stats().values()
    assert stats["pool"]["queue"] == lab.model.queue
    assert {stats["pool"]["engine"]["pid"]} == worker.engine_pids()
    assert stats["pool"]["deliveries"]


def test_report_and_other_commands_need_neither_model_nor_broker(lab: Lab) -> None:
    environment = lab.environment | {
        "NIGHTMILL_WORKER__MODEL": "/no/such/model",
        "NIGHTMILL_STATE_DIR": str(lab.path / "x"),
    }
    command = [sys.executable, "-m", "celery", "-A", "worker", "report"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EnginePool" in done.stdout
    assert not (lab.path / "x").exists()


def test_a_worker_without_its_model_says_so_and_exits(lab: Lab) -> None:
    worker = lab.worker(is_ready=False, NIGHTMILL_WORKER__MODEL="/no/such/model")
    assert worker.wait() == 2
    assert "worker_cannot_start" in worker.log
    assert "unknown model '/no/such/model'" in worker.log


def test_an_engine_that_cannot_start_ends_its_worker_and_fails_its_jobs_with_the_cause(lab: Lab) -> None:
    job, others = lab.start_job(2), lab.job(1, name="others", model=lab.other_model())
    worker = lab.worker(is_ready=False, NIGHTMILL_ENGINE__DEVICE="nowhere")
    assert worker.wait() == PERMANENT_EXIT_CODE, worker.log
    assert lab.queue.workers_serving(lab.model.queue) == 0
    assert (job.state(), others.state()) == (JobState.FAILED, JobState.QUEUED)
    failure = job.failure()
    assert failure is not None
    assert "engine.device 'nowhere' cannot be used" in failure.cause
    lab.worker()
    until(lambda: job.state() is JobState.DONE, "a worker whose engine runs to take the job all the same")


def test_an_engine_that_cannot_start_fails_no_job_that_another_worker_serves(lab: Lab) -> None:
    (lab.path / "cannot-load").touch()
    job = lab.start_job(2)
    lab.queue.announce(lab.model.queue, "another")
    worker = lab.worker(is_ready=False)
    assert worker.wait() == 1, worker.log
    assert "the engine process ended with status 3" in worker.log
    assert job.state() is JobState.QUEUED


def test_a_worker_with_an_option_that_loses_work_refuses_to_start(lab: Lab) -> None:
    worker = lab.worker("w1", "--pool=solo", "--soft-time-limit=5", is_ready=False)
    assert worker.wait() != 0
    assert "the pool must be worker.pool:EnginePool, not TaskPool" in worker.log
    assert "soft_time_limit must not be set: threads cannot be interrupted" in worker.log


@pytest.mark.parametrize("name", LOSSY_SETTINGS)
def test_settings_that_lose_work_are_refused(name: str) -> None:
    app = make_app(Settings())
    pool = EnginePool(2, app=app)
    refuse_lossy_settings(app.conf, pool, SimpleNamespace())
    app.conf[name] = "redis://h" if name == "result_backend" else True
    with pytest.raises(SettingsError, match=f"{name} must not be set"):
        refuse_lossy_settings(app.conf, pool, SimpleNamespace())


@pytest.mark.parametrize("name", LOSSY_OPTIONS)
def test_options_that_lose_work_are_refused(name: str) -> None:
    app = make_app(Settings())
    with pytest.raises(SettingsError, match=f"{name} must not be set"):
        refuse_lossy_settings(app.conf, EnginePool(2, app=app), SimpleNamespace(**{name: 5}))


def test_early_acknowledgement_is_refused() -> None:
    app = make_app(Settings())
    app.conf.task_acks_late = False
    with pytest.raises(SettingsError, match="task_acks_late must be on"):
        refuse_lossy_settings(app.conf, EnginePool(2, app=app), SimpleNamespace())


def test_importing_the_worker_loads_no_torch() -> None:
    code = (
        "import sys, worker.celery, worker.tasks;"
        "print([m for m in ('torch', 'transformers', 'xgrammar') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_engine_that_dies_is_replaced_under_the_running_chunks(lab: Lab) -> None:
    worker = lab.worker()
    job = lab.start_gated_job(2)
    until(lambda: len(lab.events("submitted")) == 2, "both chunks to run")
    (engine,) = worker.engine_pids()
    os.kill(engine, signal.SIGKILL)
    lab.gate.touch()
    lab.wait_done(job)
    lab.wait_clean()
    assert worker.is_alive
    assert engine not in worker.engine_pids()
    assert set(lab.count("leased").values()) == {1}


def test_a_worker_whose_engine_is_given_up_leaves_and_its_messages_go_back(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    worker = lab.worker(NIGHTMILL_ENGINE__MAX_RESTARTS="0")
    lab.start_job(3, seconds=30)
    until(lambda: len(lab.events("submitted")) == 2, "both chunks to run")
    os.kill(worker.engine_pids().pop(), signal.SIGKILL)
    assert worker.wait() == 1
    assert "worker_leaving" in worker.log
    assert lab.leftovers() == {"queued": 3, "unacked": 0, "index": 0}


def test_the_supervisor_starts_a_dead_embedded_broker_again(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(reconcile_interval_s=1.0)
    lab.worker()
    lab.kill_broker()
    until(lambda: broker_status(lab.settings).pid, "the broker to be back")
    lab.wait_done(lab.start_job(2))
