"""A row costs the same behind four times the rows: calls, file operations and steps are counted, not seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.loop import Engine
from jobs.finish import try_finish
from jobs.open_jobs import OpenJobs
from jobs.results import run_rows
from jobs.reuse import read_known
from jobs.source import ChunkReader
from jobs.store import Store, open_store
from jobs.thresholds import Thresholds, find_job_breach
from schemas.records import Constraint, ConstraintKind, Request, RowStatus, Sampling
from tests.counting import Work, counted
from tests.engine.fakes import make_engine
from tests.tiny_jobs import YES_NO, ScriptedEngine, make_job, write_input

CHUNK_ROWS = 8  # many chunks: what grows with their number shows
LABELS = Constraint(kind=ConstraintKind.CHOICE, source='["billing", "bug", "bookings"]')


def run_as_a_worker(store: Store, job_id: str) -> None:
    """What worker.tasks does for each message."""
    jobs, reader = OpenJobs(store), ChunkReader()
    for index in range(len(jobs.find(job_id).chunks)):
        job = jobs.find(job_id)
        assert not job.is_committed(index)
        assert not job.is_stopped()
        known = read_known(job, index)
        skip = known.statuses.keys() | known.waiting
        engine = ScriptedEngine("yes")
        rows = run_rows(job, job.chunks[index], engine, is_cancelled=lambda: False, reader=reader, skip=skip)
        assert job.commit_part(index, rows, known=known.table)
        try_finish(job)
    reader.close()


def work_of(path: Path, num_rows: int) -> Work:
    data = write_input(path / "in.parquet", {"text": [f"row {number}" for number in range(num_rows)]})
    job = make_job(path, [data], chunk_rows=CHUNK_ROWS, prompt_column="text", constraint=YES_NO)
    store = open_store(str(path / "jobs"))
    with counted() as work:
        run_as_a_worker(store, job.job_id)
    success = job.success()
    assert success is not None
    assert success.counts == {RowStatus.OK: num_rows}
    return work


def test_the_data_path_s_work_for_a_row_is_the_same_in_a_job_of_four_times_the_rows(tmp_path: Path) -> None:
    work_of(tmp_path / "warm", 64)  # imports and caches
    small, large = work_of(tmp_path / "small", 512), work_of(tmp_path / "large", 2048)
    grown = large.by_name.copy()
    grown.subtract({name: 4 * count for name, count in small.by_name.items()})
    assert large.num_calls == pytest.approx(4 * small.num_calls, rel=0.05), grown.most_common(5)
    assert large.num_file_operations == pytest.approx(4 * small.num_file_operations, rel=0.05), grown.most_common(5)


def test_thresholds_are_looked_at_without_reading_a_footer_twice(tmp_path: Path) -> None:
    data = write_input(tmp_path / "in.parquet", {"text": [f"row {number}" for number in range(64)]})
    limits = Thresholds(max_share={RowStatus.INVALID: 0.5})
    job = make_job(tmp_path, [data], chunk_rows=CHUNK_ROWS, prompt_column="text", constraint=YES_NO, thresholds=limits)
    run_as_a_worker(open_store(str(tmp_path / "jobs")), job.job_id)
    kept = OpenJobs(job.root).find(job.job_id)
    assert find_job_breach(kept) is None
    with counted() as work:
        assert find_job_breach(kept) is None
    assert not [name for name in work.by_name if "read_part_info" in name]


def requests(start: int, num_rows: int) -> Iterator[Request]:
    for number in range(start, start + num_rows):
        key = LABELS.key if number % 2 else None
        yield Request(
            request_id=str(number),
            text=f"the shared start of all prompts, row {number:06}",
            sampling=Sampling(max_tokens=8),
            constraint_key=key,
        )


def run_engine(engine: Engine, rows: Iterator[Request]) -> int:
    """Keep the engine as full as a client does; returns the steps."""
    num_steps = num_open = 0
    row = next(rows, None)
    while row is not None or engine.has_work():
        while row is not None and num_open < engine.credits:
            engine.add(row)
            num_open, row = num_open + 1, next(rows, None)
        num_open -= len(engine.step())
        num_steps += 1
    return num_steps


def test_the_engine_s_work_for_a_row_is_the_same_behind_four_times_the_rows() -> None:
    engine = make_engine(max_num_seqs=8, num_blocks=200)
    engine.add_constraint(LABELS)
    run_engine(engine, requests(0, 100))  # compiles, and fills the cache: from then on each block takes another's place
    steps: list[int] = []
    works: list[Work] = []
    for start, num_rows in ((1_000, 100), (10_000, 400)):
        with counted() as work:
            steps.append(run_engine(engine, requests(start, num_rows)))
        works.append(work)
    grown = works[1].by_name.copy()
    grown.subtract({name: 4 * count for name, count in works[0].by_name.items()})
    assert works[1].num_calls == pytest.approx(4 * works[0].num_calls, rel=0.05), grown.most_common(5)
    assert steps[1] == pytest.approx(4 * steps[0], rel=0.1), "but for filling and draining"
