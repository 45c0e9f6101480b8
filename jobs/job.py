"""A job's directory: spec, plan, parts, markers. A part's existence means that its chunk is done; nothing else does.

Knows no queue, no engine and no prompts.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Self, TypeVar

import msgspec
import pyarrow as pa

from jobs.parts import PartInfo, encode_part, read_part, read_part_info
from jobs.plan import START_AGAIN, Plan, check_format_version, decode_plan, encode_plan
from jobs.provenance import Provenance, Throughput
from jobs.shards import check_output_columns, check_output_place
from jobs.source import ChunkReader, python_rows, rescan_inputs
from jobs.store import Store, absolute_location, exists, probe, replace
from jobs.thresholds import Thresholds
from schemas.errors import AlreadyExists, JobError, JobNotFound, NotFound
from schemas.records import (
    FORMAT_VERSION,
    Chunk,
    JobSpec,
    JobState,
    Priority,
    Record,
    RowResult,
    RowStatus,
    decode_json,
    encode_json,
)

JOB_FILE, PLAN_FILE, SUCCESS_FILE = "job.json", "plan.parquet", "_SUCCESS.json"
ENFORCEMENT_FILE = "enforcement.json"  # how each keyword of the constraint is kept
REPORT_FILE = "report.html"
PARTS, PARKED, OUTPUT = "parts", "parked", "output"
CANCELLED, PAUSED, FAILED, UNLIMITED = "_cancelled", "_paused", "_failed.json", "_unlimited"
PART_NAME = re.compile(r"part-(\d+)\.parquet")
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

T = TypeVar("T")


class JobFile(Record):
    """The content of ``job.json``, written once. Only ``spec`` is the job's identity."""

    spec: JobSpec
    created: str  # UTC, ISO 8601
    output: str | None = None  # where the final files go; None: inside the job directory
    priority: Priority = Priority.INTERACTIVE
    thresholds: Thresholds | None = None  # beyond them the job is stopped
    format_version: int = FORMAT_VERSION


class OutputFile(Record):
    """One finished output file."""

    uri: str
    num_rows: int
    size_bytes: int


class Success(Record):
    """The content of ``_SUCCESS.json``, written last and once."""

    job_id: str
    state: JobState
    num_rows: int
    counts: dict[RowStatus, int]
    outputs: tuple[OutputFile, ...]
    finished: str  # UTC, ISO 8601
    num_copied: int = 0  # rows whose answer was there before they were asked
    commonest_error: str | None = None
    throughput: Throughput | None = None
    format_version: int = FORMAT_VERSION


class Failure(Record):
    """The content of ``_failed.json``: why nobody works on the job any more, until it is resumed."""

    cause: str
    failed: str  # UTC, ISO 8601
    is_abort: bool = False  # a threshold was met: a worker that has an engine does not go on by itself
    format_version: int = FORMAT_VERSION


class Job:
    """A job as its directory has it. Threads and processes may share a directory; commits decide who was first."""

    def __init__(self, root: Store, file: JobFile, plan: Plan) -> None:
        """``root`` is the jobs root; use ``create`` or ``open``."""
        self.root = root
        self.file = file
        self.store = root.within(file.spec.job_id)
        self.spec = file.spec
        self.job_id = file.spec.job_id
        self.created = file.created
        self.output = file.output
        self.priority = file.priority
        self.thresholds = file.thresholds
        self.chunks = plan.chunks
        self.input_schema: pa.Schema = plan.input_schema
        self._infos: dict[str, PartInfo] = {}  # of parts, which never change
        self._awaited: int | None = None  # the last chunk of those that had no part when somebody looked

    @classmethod
    def create(
        cls,
        store: Store,
        spec: JobSpec,
        chunks: Sequence[Chunk],
        *,
        input_schema: pa.Schema | None = None,
        output: str | None = None,
        priority: Priority = Priority.INTERACTIVE,
        thresholds: Thresholds | None = None,
        before_start: Callable[[Self], object] = lambda job: None,
    ) -> Self:
        """Create the job's directory under the jobs root, or attach to it if the same job is there already.

        An attached job keeps its chunks, priority and thresholds. Without ``input_schema`` the input files are read.
        ``before_start`` may commit parts of a new job that nobody else can see yet; if it is interrupted, the same
        submit begins it again.
        Raises JobError if the directory holds something else, InputDataError for columns that clash.
        """
        if not JOB_NAME.fullmatch(spec.name):
            raise JobError(f"job name {spec.name!r} must begin with a letter or digit and hold only those and . _ -")
        input_schema = rescan_inputs(spec.inputs).schema if input_schema is None else input_schema
        check_output_columns(spec, input_schema)
        output = None if output is None else absolute_location(output)
        check_output_place(spec.inputs, output)
        directory = store.within(spec.job_id)
        if not exists(directory, JOB_FILE):
            probe(directory)
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            file = JobFile(spec=spec, created=now, output=output, priority=priority, thresholds=thresholds)
            _create_or_keep(directory, PLAN_FILE, encode_plan(spec.job_id, Plan(tuple(chunks), input_schema)))
            before_start(cls(store, file, _read_plan(directory, spec.job_id)))
            _create_or_keep(directory, JOB_FILE, encode_json(file))
        job = cls.open(store, spec.job_id)
        if job.spec != spec:
            raise JobError(f"{directory.locate('')} holds another job than the one submitted: give it another name")
        if output not in (None, job.output):
            raise JobError(
                f"{job.job_id} exists and writes to {job.output or directory.locate(OUTPUT)}, not to {output}: "
                "leave out --output, or give the job another name"
            )
        return job

    @classmethod
    def open(cls, store: Store, job_id: str) -> Self:
        """Open an existing job. Raises JobNotFound, JobError if its files cannot be used."""
        try:
            if not JOB_NAME.fullmatch(job_id):
                raise NotFound(job_id)
            directory = store.within(job_id)
            data = directory.read(JOB_FILE)
        except NotFound as error:
            raise JobNotFound(f"no job {job_id!r} under {store.locate('')}") from error
        file = _decode(data, JobFile, directory.locate(JOB_FILE), START_AGAIN)
        if file.spec.job_id != job_id:
            raise JobError(
                f"{directory.locate(JOB_FILE)} is that of {file.spec.job_id}: it was changed, or another version of "
                f"Nightmill wrote it, which can go on with it. {START_AGAIN}"
            )
        return cls(store, file, _read_plan(directory, job_id))

    @staticmethod
    def list_ids(store: Store) -> list[str]:
        """Return the ids of all jobs under a jobs root, sorted."""
        return [name for name in store.list() if name[0] not in "._" and exists(store, f"{name}/{JOB_FILE}")]

    @property
    def num_rows(self) -> int:
        """Rows of the job: all of its chunks'."""
        return sum(chunk.num_rows for chunk in self.chunks)

    def read_rows(
        self, chunk: Chunk, columns: Sequence[str], reader: ChunkReader | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunk's input rows with ``columns``. Raises JobError if the input changed since submit."""
        for batch in self.read_batches(chunk, columns, reader):
            yield from python_rows(batch)

    def read_batches(
        self, chunk: Chunk, columns: Sequence[str], reader: ChunkReader | None = None
    ) -> list[pa.RecordBatch]:
        """Return the chunk's input rows as record batches; a ``reader`` shared by chunks decodes a row group once."""
        own = ChunkReader() if reader is None else None
        try:
            file = self.spec.inputs[chunk.input_index]
            return (reader or own or ChunkReader()).read(
                file, self.input_schema, chunk.start_row, chunk.num_rows, columns
            )
        finally:
            if own is not None:
                own.close()

    def committed(self) -> frozenset[int]:
        """Return the chunks that have a part or a parked part."""
        return self.parts() | self.parked()

    def parts(self) -> frozenset[int]:
        """Return the chunks that have a part."""
        return self._indices(PARTS)

    def parked(self) -> frozenset[int]:
        """Return the chunks given up on; a part that came later wins over it."""
        return self._indices(PARKED)

    def pending(self) -> tuple[int, ...]:
        """Return the chunks that have neither part nor parked part, in order; of a job with a canary that first."""
        committed = self.committed()
        if self.chunks and 0 not in committed and self.has_canary():
            return (0,)
        return tuple(chunk.index for chunk in self.chunks if chunk.index not in committed)

    def has_pending(self) -> bool:
        """Say whether a chunk is pending; all parts are listed only when the last one that was awaited is there."""
        if self._awaited is None or self.is_committed(self._awaited):
            committed = self.committed()
            awaited = (chunk.index for chunk in reversed(self.chunks) if chunk.index not in committed)
            self._awaited = next(awaited, None)
        return self._awaited is not None

    def has_canary(self) -> bool:
        """Say whether the first chunk must be committed, and found good enough, before the others begin."""
        return self.thresholds is not None and self.thresholds.canary_rows is not None and not self.is_unlimited()

    def is_committed(self, index: int) -> bool:
        """Say whether the chunk has a part or a parked part."""
        return any(exists(self.store, part_key(index, directory)) for directory in (PARTS, PARKED))

    def commit_part(
        self,
        index: int,
        rows: Sequence[RowResult],
        *,
        known: pa.Table | None = None,
        parked: bool = False,
        history: Sequence[str] = (),
        provenance: Provenance | None = None,
    ) -> bool:
        """Commit a chunk's results by exclusive creation. False: somebody was first, and theirs stand.

        ``known`` are those of the chunk's other rows, laid out as in a part. ``history`` is kept with a parked part:
        how often it was tried, when and where.
        Raises JobError if ``rows`` are not exactly the chunk's, StoreError if they cannot be written.
        """
        data = encode_part(
            self.spec,
            self.chunks[index],
            rows,
            known=known,
            is_parked=parked,
            history=history,
            provenance=provenance,
        )
        if parked and self.is_committed(index):
            return False
        try:
            self.store.create(part_key(index, PARKED if parked else PARTS), data)
        except AlreadyExists:
            return False
        return True

    def read_part(self, index: int) -> pa.Table:
        """Return a chunk's results, checked against job, plan and checksum. Raises NotFound, JobError."""
        key = self._key_of(index)
        with self.store.open_reader(key) as source:
            return read_part(source, self.store.locate(key), self.spec, self.chunks[index])

    def part_info(self, index: int) -> PartInfo:
        """Return what a chunk's part says of itself. Raises NotFound, JobError."""
        return self._info(self._key_of(index))

    def provenances(self) -> list[Provenance]:
        """Return how the committed chunks were computed, in the order of the chunks, as far as it is known."""
        infos = [self.part_info(index) for index in sorted(self.committed())]
        return [info.provenance for info in infos if info.provenance is not None]

    def counts(self) -> dict[RowStatus, int]:
        """Return the number of committed rows by status, from the parts' footers."""
        counts: Counter[RowStatus] = Counter()
        for info in self._committed_infos():
            counts.update(info.counts)
        return dict(counts)

    def num_copied(self) -> int:
        """Return the number of committed rows whose answer was there before they were asked."""
        return sum(info.num_copied for info in self._committed_infos())

    def success(self) -> Success | None:
        """Return how the job ended, or None if it has not."""
        try:
            data = self.store.read(SUCCESS_FILE)
        except NotFound:
            return None
        return _decode(data, Success, self.store.locate(SUCCESS_FILE), "Delete it and resume the job")

    def state(self) -> JobState:
        """Return where the job stands, from its files alone."""
        if (success := self.success()) is not None:
            return success.state
        if self.is_cancelled():
            return JobState.CANCELLED
        if self.is_paused():
            return JobState.PAUSED
        if exists(self.store, FAILED):
            return JobState.FAILED
        return JobState.RUNNING if self.committed() else JobState.QUEUED

    def cancel(self) -> None:
        """Ask everybody to stop; parts stay, and ``uncancel`` goes on from them."""
        _create_or_keep(self.store, CANCELLED, b"")

    def uncancel(self) -> None:
        """Take back ``cancel``."""
        self.store.delete(CANCELLED)

    def is_cancelled(self) -> bool:
        """Say whether the job was cancelled."""
        return exists(self.store, CANCELLED)

    def pause(self) -> None:
        """Ask that no chunk be started."""
        _create_or_keep(self.store, PAUSED, b"")

    def unpause(self) -> None:
        """Take back ``pause``."""
        self.store.delete(PAUSED)

    def is_paused(self) -> bool:
        """Say whether the job is paused."""
        return exists(self.store, PAUSED)

    def fail(self, cause: str, *, is_abort: bool = False) -> None:
        """Say that nobody works on the job, and why; parts stay.

        Whoever can work on it after all takes it back; not so an abort, which takes ``lift_limits``.
        """
        write_failure(self.store, cause, is_abort=is_abort)

    def unfail(self) -> None:
        """Take back ``fail``, unless a threshold was its reason."""
        if not self.is_aborted():
            self.store.delete(FAILED)

    def is_aborted(self) -> bool:
        """Say whether a threshold stopped the job."""
        return self.thresholds is not None and (failure := self.failure()) is not None and failure.is_abort

    def lift_limits(self) -> None:
        """Go on without thresholds: somebody has looked."""
        if self.is_aborted():
            _create_or_keep(self.store, UNLIMITED, b"")
            self.store.delete(FAILED)

    def is_unlimited(self) -> bool:
        """Say whether the thresholds hold no longer."""
        return exists(self.store, UNLIMITED)

    def is_stopped(self) -> bool:
        """Say whether no chunk may be started or go on: cancelled, paused or aborted."""
        return self.is_cancelled() or self.is_paused() or self.is_aborted()

    def failure(self) -> Failure | None:
        """Return why nobody works on the job, or None if that is not so."""
        try:
            data = self.store.read(FAILED)
        except NotFound:
            return None
        return _decode(data, Failure, self.store.locate(FAILED), "Delete it and resume the job")

    def ended_s(self) -> float | None:
        """Return when the job ended, failed or was cancelled, in seconds since 1970; None if it may go on by itself."""
        if self.state() not in (JobState.CANCELLED, JobState.FAILED) and self.success() is None:
            return None
        entries = [self.store.stat(key) for key in (SUCCESS_FILE, CANCELLED, FAILED)]
        return max((entry.modified_s for entry in entries if entry is not None), default=None)

    def unpark(self) -> tuple[int, ...]:
        """Make the chunks that were given up on pending again and return them; a finished job is open again."""
        indices = tuple(sorted(self.parked() - self.parts()))
        if indices:
            self.store.delete(SUCCESS_FILE)  # first: a crash after it leaves a job that finishes as it was
        for index in indices:
            self.store.delete(part_key(index, PARKED))
        return indices

    def _indices(self, directory: str) -> frozenset[int]:
        matches = (PART_NAME.fullmatch(name) for name in self.store.list(directory))
        return frozenset(int(match[1]) for match in matches if match) & frozenset(range(len(self.chunks)))

    def _committed_infos(self) -> Iterator[PartInfo]:
        parts = self.parts()
        for index in parts | self.parked():
            yield self._info(part_key(index, PARTS if index in parts else PARKED))

    def _key_of(self, index: int) -> str:
        return part_key(index, PARTS if exists(self.store, part_key(index)) else PARKED)

    def _info(self, key: str) -> PartInfo:
        if (info := self._infos.get(key)) is None:
            with self.store.open_reader(key) as source:
                info = read_part_info(source, self.store.locate(key))
            if not info.is_parked:
                self._infos[key] = info
        return info


def write_failure(directory: Store, cause: str, *, is_abort: bool = False) -> None:
    """Write why nobody works on the job in ``directory``, also where the job itself cannot be read."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    replace(directory, FAILED, encode_json(Failure(cause=cause, failed=now, is_abort=is_abort)))


def part_key(index: int, directory: str = PARTS) -> str:
    """Return the key of a chunk's part in the job's store."""
    return f"{directory}/part-{index:05d}.parquet"


def _create_or_keep(store: Store, key: str, data: bytes) -> None:
    with contextlib.suppress(AlreadyExists):
        store.create(key, data)


def _read_plan(directory: Store, job_id: str) -> Plan:
    where = directory.locate(PLAN_FILE)
    try:
        return decode_plan(job_id, directory.read(PLAN_FILE), where)
    except NotFound as error:
        raise JobError(f"{where} is gone. {START_AGAIN}") from error


def _decode(data: bytes, kind: type[T], where: str, cure: str) -> T:
    try:
        check_format_version(where, msgspec.json.decode(data)["format_version"])
        return decode_json(data, kind)
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise JobError(f"{where} cannot be read: {error}. {cure}") from error
