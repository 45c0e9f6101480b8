import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from jobs.job import Job
from jobs.nightly import NIGHTLY, SINCE
from schemas.records import encode_json
from tests.worker.lab import ROOT, Lab, until

SCHEDULE = """
[tickets]
cron = "* * * * *"
input = "{path}/*.parquet"
model = "{model}"
column = "text"
"""


def start_beat(lab: Lab, name: str) -> "subprocess.Popen[bytes]":
    with (lab.path / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "worker", "beat", "-l", "DEBUG"],
            env=lab.environment | {"NIGHTMILL_SCHEDULES": str(lab.path / "schedules.toml")},
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def log_of(lab: Lab, name: str) -> str:
    return (lab.path / f"{name}.log").read_text()


def test_two_beats_start_one_job_for_a_slot_and_end_on_sigterm(lab: Lab) -> None:
    lab.job(2, name="data")  # its input file is what is asked for
    (lab.path / "schedules.toml").write_text(SCHEDULE.format(path=lab.path, model=lab.settings.worker.model))
    lab.store.create(f"{NIGHTLY}/tickets/{SINCE}", encode_json(datetime(2026, 1, 1, tzinfo=UTC)))
    beats = {name: start_beat(lab, name) for name in ("one", "two")}
    for name in beats:
        until(lambda name=name: "beat: Waking up" in log_of(lab, name), "beat's first tick")  # type: ignore[misc]
    for name, beat in beats.items():
        beat.terminate()
        assert beat.wait(timeout=20) == 0, log_of(lab, name)
    nightly = [job_id for job_id in Job.list_ids(lab.store) if job_id.startswith("tickets-")]
    jobs = [Job.open(lab.store, job_id) for job_id in nightly]
    slots = {job.spec.slot for job in jobs}
    assert 1 <= len(jobs) == len(slots)
    assert lab.queue.depth(lab.model.queue) == len(jobs)


def test_beat_without_schedules_waits_and_with_wrong_ones_says_so(lab: Lab) -> None:
    beat = start_beat(lab, "idle")
    until(lambda: "beat: Waking up" in log_of(lab, "idle"), "beat's first tick")
    assert '"event": "no_schedules"' in log_of(lab, "idle")  # in JSON, as its other events
    beat.terminate()
    assert beat.wait(timeout=20) == 0, log_of(lab, "idle")
    Path(lab.path / "schedules.toml").write_text("[tickets]\ncron = 'never'")
    assert start_beat(lab, "wrong").wait(timeout=20) == 2
    assert "beat_cannot_start" in log_of(lab, "wrong")
    assert "[tickets]" in log_of(lab, "wrong")
