"""The job verbs as functions, for schedulers (Airflow, Dagster, cron): typed arguments, values back, nothing printed.

    job = submit(prepare(Submission(inputs=("data.parquet",), constraint=load_constraint(...)), settings), settings)
    state = wait(job, settings)

The command lines are thin covers of these. Knows no terminal.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import structlog

from jobs.arrow_types import label_column
from jobs.broker import ensure_broker
from jobs.finish import try_finish
from jobs.job import ENFORCEMENT_FILE, Job
from jobs.lines import BODY
from jobs.local_worker import LocalWorker
from jobs.outputs import check_output_is_free
from jobs.plan import Plan, make_chunks
from jobs.planner import copy_known_rows
from jobs.prompts import Prompt, PromptBuilder, Refusal
from jobs.queue import Queue
from jobs.shards import check_output_columns
from jobs.source import ChunkReader, Inputs, python_rows, scan_inputs
from jobs.store import Store, open_store
from jobs.thresholds import Thresholds
from jobs.wait import Reporter, Snapshot, Waiter
from schemas.constraints import KeywordDecision, enforcement_plan
from schemas.errors import (
    AlreadyExists,
    BrokerError,
    ConstraintError,
    InputDataError,
    JobError,
    JobNotFound,
    PromptError,
)
from schemas.model_files import chat_encoding, model_ref
from schemas.records import (
    Chunk,
    Constraint,
    ConstraintKind,
    InputFormat,
    JobSpec,
    JobState,
    Priority,
    RetryPolicy,
    Sampling,
    encode_json,
)
from schemas.settings import Settings

NUM_EXAMPLE_ROWS = 100
SOURCES = ("prompt_template", "prompt_column", "messages_column", "body_column")

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What a user asks for, before anything is looked at. Fields mean what JobSpec's of the same name mean."""

    inputs: Sequence[str]  # paths, globs or URIs of data files
    name: str | None = None  # None: the first input's stem
    prompt_template: str | None = None
    prompt_column: str | None = None
    messages_column: str | None = None
    body_column: str | None = None  # None for files of batch requests means their bodies
    system: str | None = None
    chat: bool = True
    constraint: Constraint | None = None
    constraint_column: str | None = None
    constraint_column_kind: ConstraintKind | None = None
    model: str = "smollm2"
    revision: str | None = None
    dtype: str = "auto"
    quantization: Literal["none", "fp8"] = "none"
    load_format: Literal["auto", "random"] = "auto"
    max_model_len: int = 4096
    deterministic: bool = False
    sampling: Sampling = field(default_factory=Sampling)
    num_completions: int = 1
    seed: int = 0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    output_column: str = "label"
    gold_column: str | None = None
    columns: tuple[str, ...] | None = None
    where: str | None = None
    limit: int | None = None
    calibration: Mapping[str, float] = field(default_factory=dict)
    output: str | None = None  # where final files go; None: inside the job directory
    chunk_rows: int | None = None  # None: Settings
    refresh: bool = False  # ask again what an earlier job has answered
    slot: str | None = None  # when the schedule of this name was due
    priority: Priority = Priority.INTERACTIVE
    thresholds: Thresholds | None = None  # beyond them the job is stopped


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A submission that passed every check; nothing is written yet."""

    spec: JobSpec
    plan: Plan
    decisions: tuple[KeywordDecision, ...]  # how each keyword of the constraint is kept
    example: Prompt | Refusal | None  # the first row's prompt, or the first row's refusal if the first rows have none
    label_type: pa.DataType
    output: str | None = None
    priority: Priority = Priority.INTERACTIVE
    thresholds: Thresholds | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the job, after ``limit``."""
        return sum(chunk.num_rows for chunk in self.plan.chunks)


def prepare(submission: Submission, settings: Settings) -> Prepared:
    """Check everything that can be checked without a broker, and plan the job. Writes nothing.

    Raises InputDataError, PromptError, ConstraintError or ModelError saying what to change.
    """
    if submission.constraint is not None and submission.constraint_column is not None:
        raise ConstraintError("give the job one constraint or a constraint column, not both")
    inputs = scan_inputs(submission.inputs)
    spec = _make_spec(submission, inputs)
    return prepare_spec(
        spec,
        inputs,
        settings,
        chunk_rows=submission.chunk_rows,
        output=submission.output,
        priority=submission.priority,
        thresholds=submission.thresholds,
    )


def prepare_spec(
    spec: JobSpec,
    inputs: Inputs,
    settings: Settings,
    *,
    output: str | None = None,
    chunk_rows: int | None = None,
    thresholds: Thresholds | None = None,
    **others: Any,
) -> Prepared:
    """Check and plan a spec whose inputs were scanned; ``others`` are fields of Prepared that it does not decide."""
    check_output_columns(spec, inputs.schema)
    _check_thinking(spec)
    if output is not None:
        check_output_is_free(spec, output, open_store(settings.jobs_root))
    builder = PromptBuilder(spec, inputs.schema)
    chunks = make_chunks(
        inputs.files,
        chunk_rows or settings.jobs.chunk_rows,
        spec.limit,
        row_bytes=inputs.row_bytes,
        chunk_bytes=settings.jobs.chunk_bytes,
        canary_rows=None if thresholds is None else thresholds.canary_rows,
    )
    return Prepared(
        spec=spec,
        plan=Plan(chunks, inputs.schema),
        decisions=() if spec.constraint is None else enforcement_plan(spec.constraint),
        example=_build_example(builder, spec, inputs.schema, chunks),
        label_type=label_column(spec).type,
        output=output,
        thresholds=thresholds,
        **others,
    )


def submit(prepared: Prepared, settings: Settings) -> Job:
    """Write the job's directory, copy what earlier jobs labelled, and queue the chunks that are left.

    The same submission again returns the same job.

    Without a configured broker the embedded one is started; somebody must still serve the queue: ``wait`` does.
    Raises StoreError, or BrokerError that says how to go on: the directory is intact then.
    """
    plan = prepared.plan
    store = open_store(settings.jobs_root)
    job = Job.create(
        store,
        prepared.spec,
        plan.chunks,
        input_schema=plan.input_schema,
        output=prepared.output,
        priority=prepared.priority,
        thresholds=prepared.thresholds,
        before_start=copy_known_rows,
    )
    with suppress(AlreadyExists):
        job.store.create(ENFORCEMENT_FILE, encode_json(prepared.decisions))
    return enqueue(job, settings)


def enqueue(job: Job, settings: Settings) -> Job:
    """Queue the chunks of ``job`` that have no part and are in nobody's hands; none of a job that was stopped.

    Raises BrokerError that says how to go on.
    """
    if try_finish(job) or job.is_stopped():
        return job
    job.unfail()
    try:
        connect_queue(settings).reconcile(job)
    except BrokerError as error:
        hint = f"the job's directory is intact: once the broker is back, run\n  python -m jobs.resume {job.job_id}"
        raise BrokerError(f"{error}\n{hint}") from error
    return job


def wait(job: Job, settings: Settings, reporter: Reporter | None = None) -> JobState:
    """Block until ``job`` has ended or is paused.

    In the embedded mode a worker is started if none serves the job's queue, and stopped at the end, whatever ends it.
    Raises EngineError when the worker keeps dying.
    """
    worker = None if settings.broker_url else LocalWorker(settings, job.spec.model)
    return Waiter(job, connect_queue(settings), settings, reporter or SilentReporter(), worker).run()


def resume(job: Job, settings: Settings, *, parked: bool = False) -> Job:
    """Queue again exactly the chunks without a part; with ``parked`` also those that were given up.

    A paused or cancelled job goes on, and one that a threshold stopped, without thresholds. Raises BrokerError.
    """
    job.unpause()
    job.uncancel()
    job.lift_limits()
    if parked:
        queue = connect_queue(settings)
        for index in job.unpark():
            queue.forget_deliveries(job.job_id, index)
    return enqueue(job, settings)


def open_job(prefix: str, settings: Settings) -> Job:
    """Open the job whose id is ``prefix`` or alone begins with it. Raises JobNotFound naming the candidates."""
    store = open_store(settings.jobs_root)
    job_ids = Job.list_ids(store)
    matching = [prefix] if prefix in job_ids else [job_id for job_id in job_ids if job_id.startswith(prefix)]
    if len(matching) == 1:
        return Job.open(store, matching[0])
    if matching:
        raise JobNotFound(f"{prefix!r} is the beginning of several jobs: {', '.join(matching)}")
    raise JobNotFound(f"no job {prefix!r} under {settings.jobs_root}: `python -m jobs.list` shows those there are")


def open_jobs(settings: Settings) -> list[Job]:
    """All jobs under the jobs root that can be used, the newest first."""
    return sorted(_usable_jobs(open_store(settings.jobs_root)), key=lambda job: job.created, reverse=True)


def _usable_jobs(store: Store) -> Iterator[Job]:
    for job_id in Job.list_ids(store):
        try:
            yield Job.open(store, job_id)
        except JobError as error:
            log.warning("job_unusable", job=job_id, reason=str(error))


def connect_queue(settings: Settings) -> Queue:
    """The queue of the configured broker, or of the embedded one, started if need be. Raises BrokerError in seconds."""
    queue = Queue(settings, ensure_broker(settings))
    queue.check()
    return queue


class SilentReporter:
    """Tells nobody."""

    def update(self, snapshot: Snapshot) -> None:
        """Ignore the snapshot."""

    def note(self, text: str) -> None:
        """Log it: a scheduler's task has no terminal."""
        log.info("wait_note", text=text)

    def close(self) -> None:
        """Nothing to end."""


def _make_spec(submission: Submission, inputs: Inputs) -> JobSpec:
    """The submission's fields under the same names, with files and model pinned."""
    shared = {
        item.name: getattr(submission, item.name)
        for item in fields(submission)
        if item.name in JobSpec.__struct_fields__ and item.name not in ("inputs", "model", "name")
    }
    if all(file.format is InputFormat.OPENAI_BATCH for file in inputs.files) and not any(map(shared.get, SOURCES)):
        shared["body_column"] = BODY
    if submission.chat:
        shared["chat_encoding"] = chat_encoding(submission.model, submission.revision)
    model = model_ref(
        submission.model,
        dtype=submission.dtype,
        quantization=submission.quantization,
        revision=submission.revision,
        load_format=submission.load_format,
        max_model_len=submission.max_model_len,
        deterministic=submission.deterministic,
    )
    name = submission.name or PurePosixPath(inputs.files[0].uri).stem
    return JobSpec(name=check_name(name, submission.name is None), inputs=inputs.files, model=model, **shared)


def _check_thinking(spec: JobSpec) -> None:
    """Refuse thinking that leaves no answer any room. Raises PromptError."""
    num_tokens = spec.sampling.thinking_budget
    if num_tokens >= spec.model.max_model_len:
        raise PromptError(
            f"thinking and its end may take {num_tokens} tokens of --max-model-len {spec.model.max_model_len}, which "
            "leaves none for an answer: lower --thinking-tokens"
        )


def check_name(name: str, is_default: bool = False) -> str:
    """A name that can be a directory's and an argument's; a default one is made so. Raises InputDataError."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:60]
    if clean and (is_default or clean == name):
        return clean
    if is_default:
        return "job"
    raise InputDataError(f"the job name {name!r} may hold letters, digits and inner . _ - only, 60 at most")


def _build_example(
    builder: PromptBuilder, spec: JobSpec, schema: pa.Schema, chunks: Sequence[Chunk]
) -> Prompt | Refusal | None:
    """Build the prompts of the first rows until one is a prompt."""
    if not chunks:
        return None
    file, num_rows = spec.inputs[chunks[0].input_index], min(NUM_EXAMPLE_ROWS, chunks[0].num_rows)
    reader = ChunkReader()
    try:
        batches = reader.read(file, schema, chunks[0].start_row, num_rows, builder.columns)
    finally:
        reader.close()
    built = [builder.build(row) for batch in batches for row in python_rows(batch)]
    return next((item for item in built if isinstance(item, Prompt)), built[0])
