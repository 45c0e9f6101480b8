"""Fourteen nights on a clock that the test moves, with real workers and an engine that pretends."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.diff import compare
from jobs.job import Job
from jobs.nightly import Beat
from jobs.verify import verify
from schemas.records import JobState, RowStatus
from tests.worker.lab import Lab, until

START = datetime(2026, 3, 20, tzinfo=UTC)  # the clocks change in this fortnight
NUM_NIGHTS, CHANGE, KILL, MISSED = 14, 5, 3, 9
CHUNK_ROWS = 8
SCHEDULE = """
[tickets]
cron = "30 2 * * *"
timezone = "Europe/Berlin"
input = "{data}/*/*.parquet"
output = "{output}/{{date}}"
prompt = "@{prompt}"
model = "{model}"
chat = false
max_tokens = 4
chunk_rows = {chunk_rows}
abort = ["failed=1%"]
"""


class Fortnight:
    """A table that grows by a partition each day, its schedule, and what became of it."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.path = lab, lab.path
        self.now = START
        self.num_rows = 0
        self.prompt = lab.path / "prompt.txt"
        places = {"data": lab.path / "data", "output": lab.path / "out", "prompt": self.prompt}
        text = SCHEDULE.format(model=lab.settings.worker.model, chunk_rows=CHUNK_ROWS, **places)
        (lab.path / "schedules.toml").write_text(text)
        self.settings = lab.settings.model_copy(update={"schedules": str(lab.path / "schedules.toml")})
        self.prompt.write_text("one: {{ text }}")

    def add_day(self) -> None:
        """A partition with new rows, one that repeats, and one that nobody can ask about."""
        day = self.now.date()
        ids = range(self.num_rows, self.num_rows + 5 + day.day % 7)
        texts = ["hello", None, *(f"row {number}" for number in ids[2:])]
        path = self.path / "data" / f"day={day}"
        path.mkdir(parents=True)
        pq.write_table(pa.table({"id": list(ids), "text": texts}), path / "rows.parquet")
        self.num_rows += len(ids)

    def tick(self) -> None:
        """Two beats at once, as after a deployment that forgot to stop the old one."""
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Beat.tick, [Beat(self.settings, lambda: self.now) for _ in range(2)]))

    def jobs(self) -> list[Job]:
        store = self.lab.store
        return sorted((Job.open(store, job_id) for job_id in Job.list_ids(store)), key=lambda job: job.spec.slot or "")

    def wait(self) -> Job:
        """The newest job, once it has ended; a supervisor starts dead workers again."""
        job = self.jobs()[-1]

        def has_ended() -> bool:
            if not any(worker.is_alive for worker in self.lab.workers):
                self.lab.worker(f"w{len(self.lab.workers)}", is_ready=False)
            return job.success() is not None

        until(has_ended, f"{job.job_id} to end")
        return job

    def rows(self, job: Job) -> list[dict[str, Any]]:
        success = job.success()
        assert success is not None
        return [row for file in success.outputs for row in pq.read_table(file.uri).to_pylist()]


@pytest.mark.slow
def test_a_fortnight_labels_every_row_once_per_template(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(visibility_timeout_s=1.5, reconcile_interval_s=1.0)
    answers = lab.path / "answers"
    lab.environment["FAKE_ANSWERS"] = str(answers)
    nights = Fortnight(lab)
    nights.tick()
    jobs: list[Job] = []
    for night in range(1, NUM_NIGHTS + 1):
        nights.now = START + timedelta(days=night)
        nights.add_day()
        if night == CHANGE:
            nights.prompt.write_text("two: {{ text }}")
        if night == KILL:
            num_chunks = sum(-(-len(pq.read_table(file)) // CHUNK_ROWS) for file in lab.path.glob("data/*/*.parquet"))
            lab.fault("validated", num_chunks - 1, "kill")
        # no beat runs in the night that is missed; one starts shortly before the next
        nights.now += timedelta(hours=24 if night == MISSED else 3)
        nights.tick()
        jobs.append(nights.wait())
        nights.tick()
    assert [job.job_id for job in nights.jobs()] == [job.job_id for job in jobs]
    assert len(jobs) == NUM_NIGHTS == len({job.spec.slot for job in jobs})
    assert not list(lab.path.glob("fault-*")), "no worker was killed"
    check_nights(nights, jobs)
    check_work(nights, jobs, answers)
    check_change(jobs)


def check_nights(nights: Fortnight, jobs: list[Job]) -> None:
    """Every night is whole, and its counts add up."""
    for number, job in enumerate(jobs, 1):
        success = job.success()
        assert success is not None
        assert success.state is JobState.DONE_WITH_ERRORS  # the rows without a text
        assert success.counts == {RowStatus.INPUT_ERROR: number, RowStatus.OK: job.num_rows - number}
        assert [row["id"] for row in nights.rows(job)] == list(range(job.num_rows))
        assert verify(job).faults == []
    assert jobs[-1].num_rows == nights.num_rows


def check_work(nights: Fortnight, jobs: list[Job], answers: Path) -> None:
    """Over all nights, each question was computed for one row of one job; a kill repeats one chunk at most."""
    computed: Counter[str] = Counter()
    for number, job in enumerate(jobs, 1):
        template = "one" if number < CHANGE else "two"
        fresh = [
            row for row in nights.rows(job) if row["label_status"] == "ok" and not row["label_meta"]["copied_from"]
        ]
        computed.update(f"{template}: {row['text']}" for row in fresh)
        success = job.success()
        assert success is not None
        assert success.num_copied == success.counts[RowStatus.OK] - len(fresh)
    texts = {row["text"] for row in nights.rows(jobs[-1])} - {None}
    early = {row["text"] for row in nights.rows(jobs[CHANGE - 2])} - {None}
    assert computed == Counter([f"one: {text}" for text in early] + [f"two: {text}" for text in texts])
    asked = Counter(answers.read_text().splitlines())
    assert asked.keys() == computed.keys()
    assert asked.total() - len(asked) <= CHUNK_ROWS


def check_change(jobs: list[Job]) -> None:
    """The night of the change differs in every label, its neighbours in none."""
    for number in range(1, NUM_NIGHTS):
        before, after = jobs[number - 1], jobs[number]
        found = compare(before, after, key=["id"])
        num_ok = before.num_rows - number
        assert found.num_flipped == (num_ok if number + 1 == CHANGE else 0), number
        assert found.num_only_second == after.num_rows - before.num_rows
        assert ("prompt_template" in found.changed) == (number + 1 == CHANGE)
