import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import structlog

from jobs.finish import try_finish
from jobs.job import Job
from jobs.nightly import LATE, NIGHTLY, RETRY, Beat, fire
from jobs.schedules import Schedule, load_schedules
from jobs.store import open_store
from schemas.records import Priority
from schemas.settings import Settings
from tests.jobs.verbs import Machine, commit, json_lines

EVERY_NIGHT = 'cron = "0 2 * * *"'
START = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Nights:
    """A machine with one schedule over a growing directory, and a clock that only this test moves."""

    def __init__(self, path: Path) -> None:
        self.machine = Machine(path)
        self.file = path / "schedules.toml"
        self.settings = Settings(state_dir=path / "state", schedules=str(self.file))
        self.now = START
        self.data = path / "data"
        self.data.mkdir()
        self.write_schedule()
        self.add_rows("first")

    def write_schedule(self, *lines: str) -> None:
        own = [f'input = "{self.data}/*.parquet"', f'model = "{self.machine.model}"', 'choice = ["a", "b"]']
        self.file.write_text("\n".join(["[tickets]", EVERY_NIGHT, *own, 'column = "text"', *lines]))

    def add_rows(self, name: str) -> None:
        self.machine.write(f"data/{name}.parquet", text=[f"{name} {number}" for number in range(3)])

    def beat(self) -> Beat:
        return Beat(self.settings, lambda: self.now)

    def schedule(self) -> Schedule:
        return load_schedules(str(self.file))["tickets"]

    def jobs(self) -> list[Job]:
        store = open_store(self.settings.jobs_root)
        return sorted((Job.open(store, job_id) for job_id in Job.list_ids(store)), key=lambda job: job.spec.slot or "")

    def slots(self) -> list[str | None]:
        return [job.spec.slot for job in self.jobs()]


@pytest.fixture
def nights(tmp_path: Path) -> Iterator[Nights]:
    nights = Nights(tmp_path)
    yield nights
    nights.machine.close()


def test_each_due_time_is_one_job_whoever_fires_it_and_how_often(nights: Nights) -> None:
    beats = [nights.beat(), nights.beat()]
    beats[0].tick()
    for _ in range(3):
        nights.now += timedelta(days=1)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Beat.tick, beats))
        nights.add_rows(f"late {len(nights.jobs())}")  # what came after the first look is the next night's
        nights.beat().tick()
        job = nights.jobs()[-1]
        commit(job, job.pending())
        assert try_finish(job)
    assert nights.slots() == [f"2026-03-0{day}T02:00+00:00" for day in (2, 3, 4)]
    assert [len(job.spec.inputs) for job in nights.jobs()] == [1, 2, 3]
    assert {job.priority for job in nights.jobs()} == {Priority.NIGHTLY}


def test_what_was_due_before_beat_first_saw_a_schedule_was_not_missed(nights: Nights) -> None:
    wait_s = nights.beat().tick()
    assert nights.jobs() == []
    assert wait_s == 60
    nights.now = datetime(2026, 3, 2, 1, 59, 40, tzinfo=UTC)
    assert nights.beat().tick() == 20
    nights.now += timedelta(seconds=20)
    nights.beat().tick()
    assert len(nights.jobs()) == 1


def test_of_the_nights_that_were_missed_the_last_is_caught_up(nights: Nights) -> None:
    nights.beat().tick()
    nights.now += timedelta(days=5)
    nights.beat().tick()
    nights.beat().tick()
    assert nights.slots() == ["2026-03-06T02:00+00:00"]


def test_without_catching_up_a_missed_night_stays_missed(nights: Nights) -> None:
    nights.write_schedule("catch_up = false")
    nights.beat().tick()
    nights.now = datetime(2026, 3, 2, 2, tzinfo=UTC) + LATE + timedelta(seconds=1)
    nights.beat().tick()
    assert nights.jobs() == []
    nights.now += timedelta(days=1, seconds=-2)
    nights.beat().tick()
    assert nights.slots() == ["2026-03-03T02:00+00:00"]


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_a_night_that_is_not_over_holds_the_next_one_or_not(nights: Nights, overlap: str) -> None:
    nights.write_schedule(f'overlap = "{overlap}"')
    beat = nights.beat()
    for _ in range(3):
        beat.tick()
        nights.now += timedelta(days=1)
    assert len(nights.jobs()) == (1 if overlap == "skip" else 2)
    slot = fire(nights.schedule(), datetime(2026, 3, 3, 2, tzinfo=UTC), nights.settings, now=nights.now, by_hand=True)
    assert slot.skipped is None  # somebody wants it
    assert len(nights.jobs()) == 2


def test_a_slot_that_was_claimed_by_a_process_that_died_is_started_as_it_was_claimed(nights: Nights) -> None:
    nights.beat().tick()
    nights.now += timedelta(days=1)
    nights.beat().tick()
    (job,) = nights.jobs()
    shutil.rmtree(job.store.locate(""))
    nights.add_rows("since then")
    nights.beat().tick()
    assert nights.jobs() == []  # it was started: somebody removed it
    next(Path(nights.settings.jobs_root, NIGHTLY, "tickets").glob("*.started")).unlink()
    nights.beat().tick()
    assert [again.spec for again in nights.jobs()] == [job.spec]


def test_data_that_come_late_are_waited_for(nights: Nights) -> None:
    (nights.data / "first.parquet").unlink()
    beat = nights.beat()
    beat.tick()
    nights.now += timedelta(days=1)
    beat.tick()
    nights.add_rows("late")
    beat.tick()
    assert nights.jobs() == []  # not looked at each minute
    nights.now += RETRY
    beat.tick()
    assert nights.slots() == ["2026-03-02T02:00+00:00"]


def test_a_file_that_is_edited_wrongly_keeps_the_schedules_that_were_there(nights: Nights) -> None:
    beat = nights.beat()
    beat.tick()
    nights.file.write_text("[tickets]\ncron = 7")
    nights.now += timedelta(days=1)
    beat.tick()
    assert len(nights.jobs()) == 1


def test_by_hand_a_slot_is_the_job_that_beat_would_have_made(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTMILL_SCHEDULES", str(nights.file))
    nights.beat().tick()
    for _ in range(2):
        done = nights.machine.run("nightly", "tickets", "--date", "2026-03-02", "--no-wait")
        assert done.exit_code == 0, done.output
    nights.now += timedelta(days=1)
    nights.beat().tick()
    assert nights.slots() == ["2026-03-02T02:00+00:00"]
    (listed,) = json_lines(nights.machine.run("nightly", "--list", "--json"))
    assert (listed["last_job"], listed["last_state"]) == (nights.jobs()[0].job_id, "queued")
    assert len(listed["next"]) == 3
    assert "tickets" in nights.machine.run("nightly", "--list").stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "no schedule 'nothing'; there are tickets"),
        ([], "say which schedule; there are tickets"),
        (["tickets", "--date", "tomorrow"], "'tomorrow' is no day"),
        (["tickets", "--date", "2026-03-02T05:00"], "is not due 2026-03-02T05:00"),
    ],
)
def test_what_cannot_run_by_hand_is_said(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.setenv("NIGHTMILL_SCHEDULES", str(nights.file))
    done = nights.machine.run("nightly", *arguments)
    assert (done.exit_code, told in done.stderr) == (2, True), done.output


def test_what_would_keep_a_night_from_running_is_told_before_it(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NIGHTMILL_SCHEDULES", str(nights.file))
    nights.write_schedule('prompt = "@prompt.txt"')
    with structlog.testing.capture_logs() as logs:
        nights.beat().tick()
    (event,) = (entry for entry in logs if entry["event"] == "schedule_cannot_run")
    done = nights.machine.run("nightly", "--list")
    assert (done.exit_code, "[tickets] cannot run: cannot read prompt.txt" in done.stderr) == (1, True), done.output
    assert event["reason"] in done.stderr
    nights.file.unlink()
    with structlog.testing.capture_logs() as logs:
        nights.beat()
    assert [entry["event"] for entry in logs] == ["no_schedules"]
    assert "schedules.toml is missing" in nights.machine.run("nightly", "--list").stdout
    assert "schedules.toml is missing" in nights.machine.run("nightly", "tickets").stderr
