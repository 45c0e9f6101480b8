import signal

from tests.worker.lab import Lab


def test_a_worker_runs_a_job_to_its_end_and_leaves_nothing_behind(lab: Lab) -> None:
    worker = lab.worker()
    job = lab.start_job(6)
    lab.wait_done(job)
    lab.wait_clean()
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    print(worker.log)
    assert set(lab.count("leased").values()) == {1}
