"""What a dead worker leaves of a chunk is read back, whatever state it is in, and never asked of the engine again."""

import errno
import os
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.job import Job
from jobs.results import run_rows
from jobs.spill import Spill, open_spill
from jobs.store import LocalDirectory, open_store
from schemas.errors import EngineError
from schemas.records import Attempt, FinishReason, Label, Request, RowResult, RowStatus
from tests.tiny_jobs import YES_NO, Answer, ScriptedEngine, json_schema, make_job, prompt_of, results_of


def make_spill(job: Job, index: int = 0, place: Path | None = None) -> Spill:
    """One that writes at once."""
    return Spill(LocalDirectory(place or Path(job.store.locate(""))), job.job_id, job.chunks[index], flush_s=0)


def files(job: Job) -> list[Path]:
    return sorted(Path(job.store.locate("_staging")).glob("spill-*"))


class Mortal(ScriptedEngine):
    """An engine that is given up after some rows."""

    def __init__(self, num_rows: int, answer: Answer = "yes") -> None:
        super().__init__(self._die_or_answer)
        self._left, self._text = num_rows, answer

    def _die_or_answer(self, request: Request) -> Answer:
        if self._left == 0:
            raise EngineError("the engine was given up")
        self._left -= 1
        return self._text


def run(job: Job, engine: ScriptedEngine) -> list[RowResult]:
    with closing(make_spill(job)) as spill:
        return run_rows(job, job.chunks[0], engine, is_cancelled=lambda: False, spill=spill)


def die_after(job: Job, num_rows: int) -> None:
    with pytest.raises(EngineError):
        run(job, Mortal(num_rows))


def test_rows_that_were_done_are_not_asked_again_and_come_out_as_they_were(tmp_path: Path) -> None:
    job = make_job(tmp_path, chunk_rows=10, constraint=YES_NO)
    undisturbed = run_rows(job, job.chunks[0], ScriptedEngine(), is_cancelled=lambda: False)
    die_after(job, 7)
    engine = ScriptedEngine()
    assert run(job, engine) == undisturbed
    assert [prompt_of(request).split()[-1] for request in engine.requests] == ["7", "8", "9"]


def test_a_second_death_keeps_the_rows_of_both_attempts(tmp_path: Path) -> None:
    job = make_job(tmp_path, chunk_rows=10)
    for num_rows in (3, 4):
        die_after(job, num_rows)
    engine = ScriptedEngine()
    rows = run(job, engine)
    assert [row.row_index for row in rows] == list(range(10))
    assert len(engine.requests) == 3


def test_two_attempts_at_once_write_two_files(tmp_path: Path) -> None:
    job = make_job(tmp_path, chunk_rows=4)
    rows = results_of(job, 0)
    with closing(make_spill(job)) as slow, closing(make_spill(job)) as quick:
        slow.add(rows[0])
        quick.add(rows[1])
        slow.add(rows[1])
        assert make_spill(job).read() == {0: rows[0], 1: rows[1]}
        quick.remove()
        slow.add(rows[2])  # it finds out at the commit
    assert make_spill(job).read() == {}
    assert files(job) == []


@given(cut=st.integers(0, 400), tail=st.binary(max_size=40))
def test_a_torn_tail_costs_the_rows_behind_it_only(
    tmp_path_factory: pytest.TempPathFactory, cut: int, tail: bytes
) -> None:
    job = make_job(tmp_path_factory.mktemp("job"), chunk_rows=4)
    rows = results_of(job, 0)
    with closing(make_spill(job)) as spill:
        for row in rows:
            spill.add(row)
    (path,) = files(job)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)] + tail)
    found = make_spill(job).read()
    assert list(found.values()) == rows[: len(found)]
    assert found.keys() == set(range(len(found)))
    assert len(found) == len(rows) or cut > 0


@pytest.mark.parametrize("harm", ["zeros", "flipped bit", "empty", "nothing but noise"])
def test_damage_is_never_taken_for_a_row(tmp_path: Path, harm: str) -> None:
    job = make_job(tmp_path, chunk_rows=4)
    rows = results_of(job, 0)
    with closing(make_spill(job)) as spill:
        for row in rows:
            spill.add(row)
    (path,) = files(job)
    data = path.read_bytes()
    middle = len(data) - 10
    harmed = {
        "zeros": data[:middle] + bytes(4096),
        "flipped bit": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "empty": b"",
        "nothing but noise": os.urandom(300),
    }
    path.write_bytes(harmed[harm])
    found = make_spill(job).read()
    assert all(found[index] == rows[index] for index in found)
    assert len(found) < len(rows)


def test_another_chunk_s_or_job_s_rows_are_not_taken(tmp_path: Path) -> None:
    job, other = make_job(tmp_path, chunk_rows=4), make_job(tmp_path, chunk_rows=4, seed=1)
    with closing(make_spill(job)) as spill:
        spill.add(results_of(job, 0)[0])
    assert make_spill(job, 1).read() == {}
    (path,) = files(job)
    for index in (0, 1):
        stray = Path(other.store.locate("_staging")) / f"spill-{other.job_id}-{index:05d}-x"
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(path.read_bytes())
        assert make_spill(other, index).read() == {}


def test_every_field_of_a_result_survives(tmp_path: Path) -> None:
    job = make_job(tmp_path, chunk_rows=4, constraint=json_schema({"type": "object"}))
    row = RowResult(
        row_index=0,
        status=RowStatus.CLOSED,
        raw='{"ü": 1}',
        value={"b": [1, 2.5, None, True, -(2**63)], "a": "ü"},
        finish_reason=FinishReason.CLOSED,
        attempts=(
            Attempt(
                status=RowStatus.OK, finish_reason=FinishReason.STOP, seed=2**62, max_tokens=3, num_output_tokens=1
            ),
        ),
        labels=(Label(path="/b", text="ü", probability=0.25, ranked=(("ü", 0.25),)),),
        seconds=1.5,
    )
    half_pair = RowResult(row_index=1, status=RowStatus.INVALID, raw="\ud800", error="no")
    with closing(make_spill(job)) as spill:
        spill.add(half_pair)
        spill.add(row)
    (found,) = make_spill(job).read().values()
    assert found == row
    assert list(found.value) == ["b", "a"]


def test_a_failed_row_is_kept_once_the_engine_has_served_another(tmp_path: Path) -> None:
    """What breaks every row is the engine: the next worker's may be whole."""
    job = make_job(tmp_path, chunk_rows=4)
    good, failed = results_of(job, 0), results_of(job, 0, RowStatus.FAILED)
    with closing(make_spill(job)) as spill:
        for row in (failed[0], good[1], failed[2]):
            spill.add(row)
    assert make_spill(job).read() == {0: failed[0], 1: good[1]}


class FullDisk(LocalDirectory):
    """Takes the first bytes of each log."""

    def open_log(self, key: str) -> IO[bytes]:
        with super().open_log(key) as file:
            file.write(b"\x01")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_spill_and_no_row(tmp_path: Path) -> None:
    job = make_job(tmp_path, chunk_rows=10)
    spill = Spill(FullDisk(Path(job.store.locate(""))), job.job_id, job.chunks[0], flush_s=0)
    with closing(spill):
        rows = run_rows(job, job.chunks[0], ScriptedEngine(), is_cancelled=lambda: False, spill=spill)
    assert len(rows) == 10
    assert make_spill(job).read() == {}
    spill.remove()
    assert files(job) == []


def test_a_short_chunk_writes_no_file(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with closing(open_spill(job, job.chunks[0], tmp_path / "state")) as spill:
        for row in results_of(job, 0):
            spill.add(row)
    assert files(job) == []


@pytest.fixture
def bucket_job(tmp_path: Path) -> Job:
    return make_job(tmp_path, store=open_store(f"memory://spill-{os.getpid()}"))


def test_a_job_in_a_bucket_spills_into_the_state_directory(bucket_job: Job, tmp_path: Path) -> None:
    spill = open_spill(bucket_job, bucket_job.chunks[0], tmp_path / "state")
    spill._flush_s = spill._flush_at_s = 0
    (row, *_) = results_of(bucket_job, 0)
    with closing(spill):
        spill.add(row)
    assert open_spill(bucket_job, bucket_job.chunks[0], tmp_path / "state").read() == {0: row}
    assert open_spill(bucket_job, bucket_job.chunks[0], tmp_path / "other").read() == {}
    spill.remove()
    assert list((tmp_path / "state" / "spills" / "_staging").iterdir()) == []
