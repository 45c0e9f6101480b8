"""Small jobs for tests: input files, a spec, a job directory, and an engine that answers from a script."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.job import Job
from jobs.plan import make_chunks
from jobs.results import run_rows
from jobs.source import scan_inputs
from jobs.store import Store, open_store
from schemas.records import (
    Completion,
    Constraint,
    ConstraintKind,
    FinishReason,
    JobSpec,
    ModelRef,
    Request,
    RowResult,
    RowStatus,
)

MODEL = ModelRef(name="tiny", digest="0123456789abcdef", max_model_len=512)
YES_NO = Constraint(kind=ConstraintKind.CHOICE, source='["yes", "no"]')
Answer = str | tuple[str, FinishReason] | Completion


def json_schema(schema: Mapping[str, Any]) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema))


def write_input(path: Path, columns: Mapping[str, Any] | pa.Table, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def make_job(
    root: Path, locations: Sequence[Path | str] = (), *, store: Store | None = None, chunk_rows: int = 4, **fields: Any
) -> Job:
    """Create a job under ``root``; without locations its input is ten rows of text."""
    if not locations:
        path = root / "in.parquet"
        locations = [path if path.exists() else write_input(path, {"text": [f"row {i}" for i in range(10)]})]
    outside = {name: fields.pop(name) for name in ("output", "thresholds") if name in fields}
    inputs = scan_inputs([str(location) for location in locations])
    spec = JobSpec(**{"name": "tiny", "model": MODEL, "inputs": inputs.files, **fields})
    chunks = make_chunks(inputs.files, chunk_rows, spec.limit)
    store = open_store(str(root / "jobs")) if store is None else store
    return Job.create(store, spec, chunks, input_schema=inputs.schema, **outside)


class ScriptedEngine:
    """Answers each request with ``answer(request)``, at once; keeps what it was asked."""

    def __init__(self, answer: Callable[[Request], Answer] | Answer = "yes") -> None:
        self._answer = answer
        self.requests: list[Request] = []

    def __call__(self, request: Request, constraint: Constraint | None) -> Future[Completion]:
        assert (constraint.key if constraint else None) == request.constraint_key
        self.requests.append(request)
        future: Future[Completion] = Future()
        answer = self._answer(request) if callable(self._answer) else self._answer
        future.set_result(completion(request, answer))
        return future

    def prompts(self) -> list[str]:
        return [prompt_of(request) for request in self.requests]


def completion(request: Request, answer: Answer) -> Completion:
    if isinstance(answer, Completion):
        return answer
    text, reason = (answer, FinishReason.STOP) if isinstance(answer, str) else answer
    return Completion(
        request_id=request.request_id,
        finish_reason=reason,
        text=text,
        token_ids=tuple(range(len(text))),
        num_prompt_tokens=7,
    )


def prompt_of(request: Request) -> str:
    return request.text if request.text is not None else request.messages[-1].content


def run_chunk(job: Job, index: int, engine: ScriptedEngine) -> list[RowResult]:
    return run_rows(job, job.chunks[index], engine, is_cancelled=lambda: False)


def run_job(job: Job, engine: ScriptedEngine | None = None) -> Job:
    """Commit every pending chunk."""
    for index in job.pending():
        assert job.commit_part(index, run_chunk(job, index, engine or ScriptedEngine()))
    return job


def results_of(job: Job, index: int, status: RowStatus = RowStatus.OK) -> list[RowResult]:
    """Make results for a chunk without any engine."""
    chunk = job.chunks[index]
    rows = range(chunk.start_row, chunk.start_row + chunk.num_rows)
    label = "yes" if status is RowStatus.OK else None
    return [RowResult(row_index=row, status=status, value=label, raw=label) for row in rows]
