"""The data path without a model: Parquet in, prompts, validation, parts, Parquet out.

Answers come from nowhere at once. One thread, one process: what a worker spends on a row beside generating it.
Knows no engine.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.api import Submission, prepare
from jobs.finish import try_finish
from jobs.job import Job
from jobs.results import run_rows
from jobs.source import ChunkReader
from jobs.store import open_store
from ops.bench.measurement import Run, summarise, write_result
from schemas.constraints import load_constraint
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, Request, RowStatus
from schemas.settings import Settings

ANSWER = '{"route": "bug"}'
SCHEMA = '{"type": "object", "properties": {"route": {"enum": ["billing", "bug", "other"]}}, "required": ["route"]}'
TEXT = "The report of {} shows another total than the table below it. It worked before the update. "


@dataclass(frozen=True)
class DataPathBench:
    """What to measure."""

    num_rows: int = 100_000
    repeats: int = 3


def run_data_path_bench(bench: DataPathBench) -> list[str]:
    """Measure, write the JSON file, and return the lines to print."""
    runs: list[Run] = []
    phases: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="nm-") as directory:
        root = Path(directory)
        settings = Settings.load(state_dir=root / "state")
        _write_input(root / "input.parquet", bench.num_rows)
        for repeat in range(bench.repeats):
            seconds, num_ok = _run_job(root / "input.parquet", repeat, settings)
            phases.append(seconds)
            total = sum(seconds.values())
            runs.append(Run("data path", repeat, total, bench.num_rows, 0, num_ok, os.getloadavg()[0]))
    phase_seconds = {name: median(seconds[name] for seconds in phases) for name in phases[0]}
    config = {"num_rows": bench.num_rows, "repeats": bench.repeats, "chunk_rows": settings.jobs.chunk_rows}
    path = write_result("jobs-data-path", config, runs, phase_seconds=phase_seconds)
    rate = summarise(runs)["data path"]["rows_per_s"]
    shares = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phase_seconds.items())
    return [f"data path: {rate.median:.0f} rows/s ({rate.low:.0f} - {rate.high:.0f}); {shares}", f"written to {path}"]


def _write_input(path: Path, num_rows: int) -> None:
    texts = [TEXT.format(index) + "Please help. " * (index % 8) for index in range(num_rows)]
    table = pa.table({"id": pa.array(range(num_rows), pa.int64()), "text": texts})
    pq.write_table(table, path, row_group_size=50_000)


def _run_job(path: Path, seed: int, settings: Settings) -> tuple[dict[str, float], int]:
    """Run one job in this thread: seconds by phase, and how many rows are ok."""
    seconds = dict.fromkeys(("plan", "label", "commit", "finish"), 0.0)
    with _timed(seconds, "plan"):
        job = _create_job(path, seed, settings)
    reader = ChunkReader(settings.jobs.read_batch_bytes)
    for chunk in job.chunks:
        with _timed(seconds, "label"):
            rows = run_rows(job, chunk, _answer, is_cancelled=lambda: False, reader=reader)
        with _timed(seconds, "commit"):
            job.commit_part(chunk.index, rows)
    with _timed(seconds, "finish"):
        try_finish(job)
    return seconds, job.counts()[RowStatus.OK]


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] += time.perf_counter() - start


def _create_job(path: Path, seed: int, settings: Settings) -> Job:
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, SCHEMA)
    submission = Submission(inputs=(str(path),), prompt_column="text", constraint=constraint, seed=seed)
    prepared = prepare(submission, settings)
    store = open_store(settings.jobs_root)
    return Job.create(store, prepared.spec, prepared.plan.chunks, input_schema=prepared.plan.input_schema)


def _answer(request: Request, _constraint: Constraint | None) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_result(Completion(request_id=request.request_id, finish_reason=FinishReason.STOP, text=ANSWER))
    return future
