import signal
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from jobs.planner import copy_known_rows
from jobs.spill import open_spill
from schemas.records import JobState, RowStatus
from tests.worker.lab import Lab, until

HOPS = ("received", "leased", "submitted", "validated", "committed", "finished")


def test_a_chunk_that_runs_longer_than_the_visibility_timeout_runs_once(make_lab: Callable[..., Lab]) -> None:
    """celery#5935: without renewal it is delivered again every second or two, for ever."""
    lab = make_lab(visibility_timeout_s=1.5)
    for name in ("w1", "w2"):
        lab.worker(name)
    job = lab.start_job(1, seconds=3)
    lab.wait_done(job)
    lab.wait_clean()
    assert lab.count("received") == {0: 1}


@pytest.mark.slow
def test_a_worker_killed_at_any_hop_loses_and_doubles_nothing(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(visibility_timeout_s=1.5, reconcile_interval_s=1.0)
    for chunk, hop in enumerate(HOPS):
        lab.fault(hop, chunk, "kill")
    job = lab.start_job(len(HOPS))
    worker = lab.worker(is_ready=False)
    num_deaths = 0

    def is_done() -> bool:
        nonlocal worker, num_deaths
        if not worker.is_alive:
            num_deaths += 1
            worker = lab.worker(is_ready=False)
        return job.state() == JobState.DONE and worker.is_alive and not any(lab.leftovers().values())

    until(is_done, "the job to be done", 120)
    assert not any(lab.path.glob("fault-*"))
    assert num_deaths == len(HOPS)
    assert job.counts() == {RowStatus.OK: len(HOPS)}
    assert job.success() is not None


def test_a_worker_killed_late_in_a_long_chunk_does_not_cost_the_rows_it_had_done(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(visibility_timeout_s=1.5)
    answers = lab.path / "answers"
    lab.environment["FAKE_ANSWERS"] = str(answers)
    victim = lab.worker("victim")
    job = lab.start_job(1, seconds=0.4, chunk_rows=96)
    until(lambda: answers.exists() and answers.read_text().count("\n") >= 64, "most rows to be done")
    engines = victim.engine_pids()
    victim.kill()
    until(lambda: not any(map(psutil.pid_exists, engines)), "the engine to follow its worker")
    num_answered = answers.read_text().count("\n")
    num_kept = len(open_spill(job, job.chunks[0], lab.settings.state_dir).read())
    assert num_kept > 0
    lab.worker("heir")
    lab.wait_done(job)
    assert job.counts() == {RowStatus.OK: 96}
    assert answers.read_text().count("\n") == 96 + num_answered - num_kept
    until(lambda: not job.store.list("_staging"), "the spill to be removed")


def test_rows_that_ask_the_same_run_once_however_many_workers(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(reconcile_interval_s=1.0)
    answers = lab.path / "answers"
    lab.environment["FAKE_ANSWERS"] = str(answers)
    for name in ("w1", "w2"):
        lab.worker(name)
    job = lab.start_job(8, seconds=0.3, chunk_rows=4, text=lambda row: f"row {row % 5}", before_start=copy_known_rows)
    until(lambda: job.success() is not None, "the job to be done")
    assert sorted(answers.read_text().splitlines()) == [f"row {number}" for number in range(5)]
    assert job.counts() == {RowStatus.OK: 32}
    assert job.num_copied() == 27


def test_a_message_lost_with_its_worker_is_found_missing_and_sent_again(make_lab: Callable[..., Lab]) -> None:
    """celery#4354: a worker that dies between taking a message and noting it takes the message with it."""
    lab = make_lab(reconcile_interval_s=1.0)
    victim = lab.worker("victim")
    until(lambda: lab.redis.info("clients")["blocked_clients"] == 1, "the worker to wait for messages")
    victim.signal(signal.SIGSTOP)
    job = lab.start_job(1)
    until(lambda: lab.leftovers()["queued"] == 0, "the stopped worker's connection to take the message")
    victim.kill()
    assert lab.leftovers() == {"queued": 0, "unacked": 0, "index": 0}
    lab.worker("heir")
    lab.wait_done(job)
    assert lab.count("leased") == {0: 1}


def test_a_flushed_broker_loses_nothing_and_doubles_nothing_that_runs(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(reconcile_interval_s=1.0)
    lab.worker()
    job = lab.start_job(5, seconds=1)
    until(lambda: len(lab.events("submitted")) >= 2, "both slots to be busy")
    lab.redis.flushall()
    lab.wait_done(job)
    assert set(lab.count("leased").values()) == {1}


def test_a_chunk_that_always_fails_is_parked_with_its_cause_and_the_job_goes_on(lab: Lab) -> None:
    lab.fault("submitted", 1, "raise-always")
    lab.worker()
    job = lab.start_job(4)
    lab.wait_done(job)
    lab.wait_clean()
    until(lambda: job.state() == JobState.DONE_WITH_ERRORS, "the job to be finished")
    assert lab.count("submitted")[1] == lab.settings.jobs.max_chunk_deliveries
    assert job.parked() == {1}
    assert job.counts() == {RowStatus.OK: 3, RowStatus.FAILED: 1}
    success = job.success()
    assert success is not None
    assert "RuntimeError: poison" in (success.commonest_error or "")


@pytest.mark.slow
def test_a_chunk_that_kills_its_workers_is_parked_and_its_neighbour_is_not(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(visibility_timeout_s=1.5)
    lab.fault("submitted", 0, "kill-always")
    job = lab.start_job(2, seconds=1)
    worker = lab.worker(is_ready=False)

    def is_done() -> bool:
        nonlocal worker
        if not worker.is_alive:
            worker = lab.worker(is_ready=False)
        return not job.pending()

    until(is_done, "the job to be done", 90)
    assert lab.count("submitted")[0] == lab.settings.jobs.max_chunk_deliveries
    assert job.parked() == {0}
    assert job.parts() == {1}
    history = job.part_info(0).history
    assert len(history) == 1 + lab.settings.jobs.max_chunk_deliveries, "the last one parked it"
    assert len({entry.split(" pid ")[1] for entry in history}) == len(history)


def test_an_exit_inside_a_task_frees_its_slot_and_the_chunk_is_tried_again(lab: Lab) -> None:
    for chunk in (0, 1):
        lab.fault("submitted", chunk, "exit")
    worker = lab.worker()
    job = lab.start_job(4)
    lab.wait_done(job)
    lab.wait_clean()
    assert worker.is_alive
    assert lab.count("submitted") == {0: 2, 1: 2, 2: 1, 3: 1}
    assert job.counts() == {RowStatus.OK: 4}


def test_a_full_disk_makes_the_slot_rest_and_is_not_held_against_the_chunk(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(drain_s=0.1)
    lab.fault("validated", 0, "full-disk")
    worker = lab.worker()
    job = lab.start_job(1)
    until(lambda: "chunk_postponed" in worker.log, "the disk to be full")
    assert lab.leftovers()["unacked"] == 1, "the resting slot keeps its message, so that it takes no other"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert lab.leftovers() == {"queued": 1, "unacked": 0, "index": 0}
    assert not lab.redis.keys("nightmill:deliveries:*")
    lab.worker("w2")
    lab.wait_done(job)


def test_a_second_delivery_of_a_running_or_committed_chunk_does_nothing(lab: Lab) -> None:
    lab.worker()
    job = lab.start_job(1, seconds=2)
    until(lambda: lab.events("submitted"), "the chunk to run")
    lab.queue.enqueue(job, [0])
    until(lambda: lab.count("received")[0] == 2, "the second message to arrive")
    lab.wait_done(job)
    lab.queue.enqueue(job, [0])
    until(lambda: lab.count("received")[0] == 3, "the third message to arrive")
    lab.wait_clean()
    assert lab.count("leased") == {0: 1}


def test_a_worker_that_cannot_use_a_job_fails_it_with_the_cause_until_somebody_can(lab: Lab) -> None:
    job = lab.job(2)
    plan = job.store.read("plan.parquet")
    job.store.delete("plan.parquet")
    lab.queue.enqueue(job, job.pending())
    lab.worker()
    until(lambda: job.state() is JobState.FAILED, "the job to fail")
    failure = job.failure()
    assert failure is not None
    assert "cannot use the job" in failure.cause
    assert "plan.parquet is gone" in failure.cause
    lab.wait_clean()
    job.store.create("plan.parquet", plan)
    lab.queue.enqueue(job, job.pending())
    until(lambda: job.state() is JobState.DONE, "the job to be done after all")


def test_no_worker_hoards_chunks_that_another_could_run(lab: Lab) -> None:
    """celery#4537: one of two workers has all the long tasks, and the other none."""
    for name in ("w1", "w2"):
        lab.worker(name)
    lab.start_job(4, seconds=30)
    until(lambda: len(lab.events("submitted")) == 4, "all four chunks to run")
    assert sorted(Counter(event["pid"] for event in lab.events("submitted")).values()) == [2, 2]
