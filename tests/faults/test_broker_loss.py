"""What Celery 5.7 and kombu 5.7 do wrong when the broker or the connection goes away; see worker.consumer."""

import socket

import pytest

from jobs.queue import Queue
from tests.worker.lab import Lab, Worker, until


def start_one_of_two_slots(lab: Lab, seconds: float) -> tuple[Worker, int]:
    """A worker with a running chunk and a free slot, so that a read is pending; and its engine."""
    worker = lab.worker()
    lab.start_job(1, seconds)
    until(lambda: lab.events("submitted"), "the chunk to run")
    (engine,) = worker.engine_pids()
    return worker, engine


def test_a_broker_restart_in_mid_task_costs_neither_worker_nor_engine_nor_a_second_run(lab: Lab) -> None:
    """Stock: the worker exits with an AttributeError about hostname (kombu#582)."""
    worker, engine = start_one_of_two_slots(lab, seconds=4)
    lab.kill_broker()
    lab.start_broker()
    lab.wait_clean()
    assert worker.is_alive
    assert worker.engine_pids() == {engine}
    assert lab.count("leased") == {0: 1}
    lab.wait_done(lab.start_job(3, name="next"))


def test_a_cut_connection_does_not_start_running_chunks_again(lab: Lab) -> None:
    """Stock: every message of the lost connection goes back to the queue while it still runs (celery#3430)."""
    for name in ("w1", "w2"):
        lab.worker(name)
    job = lab.start_job(3, seconds=4)
    until(lambda: len(lab.events("submitted")) == 3, "all chunks to run")
    lab.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    lab.wait_done(job)
    lab.wait_clean()
    assert set(lab.count("received").values()) == {1}
    assert all(worker.is_alive for worker in lab.workers)


@pytest.mark.slow
def test_a_worker_consumes_again_after_several_losses_in_a_row(lab: Lab) -> None:
    """celery#8030, celery#10205: alive but deaf after a reconnect."""
    worker = lab.worker()
    for _ in range(5):
        lab.kill_broker()
        lab.start_broker()
    lab.wait_done(lab.start_job(3), deadline_s=60)
    assert worker.is_alive


def test_a_broker_over_tcp_with_a_password_and_a_database_number_serves_as_well(lab: Lab) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lab.redis.config_set("port", port)
    lab.redis.config_set("requirepass", "hunter2")
    try:
        url = f"redis://:hunter2@127.0.0.1:{port}/1"
        queue = Queue(lab.settings, url)
        worker = lab.worker(NIGHTMILL_BROKER_URL=url)
        job = lab.job(3, seconds=3)
        queue.enqueue(job, job.pending())
        until(lambda: len(lab.events("submitted")) == 2, "both slots to be busy")
        lab.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        lab.wait_done(job)
        assert set(lab.count("leased").values()) == {1}
        assert queue.workers_serving(lab.model.queue) == 1
        assert "hunter2" not in worker.log
    finally:
        lab.redis.config_set("requirepass", "")
