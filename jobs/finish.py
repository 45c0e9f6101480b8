"""The end of a job: output files in input order, counts, the success file. Whoever commits a part may try it.

Two finishers write the same content; the success file, created last and exclusively, is the end. Knows no queue.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.arrow_types import output_names, result_fields, row_column
from jobs.job import SUCCESS_FILE, Job, OutputFile, Success
from jobs.ledger import LedgerWriter
from jobs.outputs import DETERMINISTIC_KEY, JOB_KEY, output_store, owner_of
from jobs.provenance import measure_throughput
from jobs.shards import shard_names
from jobs.source import ChunkReader
from jobs.store import Store, exists
from jobs.store_errors import is_transient
from schemas.errors import AlreadyExists, InputDataError, JobError, StoreError
from schemas.records import Chunk, JobState, RowStatus, encode_json

ROW_GROUP_ROWS, ROW_GROUP_BYTES = 65_536, 128 * 2**20
MAX_ERROR_KINDS = 10_000
WRITER_OPTIONS = {"compression": "zstd", "write_page_checksum": True}
GOOD = frozenset({RowStatus.OK, RowStatus.CLOSED, RowStatus.SKIPPED})


def try_finish(job: Job) -> bool:
    """Write the outputs and the success file if every chunk is committed. True: the job is finished, by whomever.

    Raises JobError if parts, plan and input contradict each other, StoreError if the output cannot be written.
    """
    if exists(job.store, SUCCESS_FILE):
        return True
    if job.has_pending():
        return False
    tally, ledger = _Tally(), LedgerWriter(job)
    try:
        outputs = tuple(_write_outputs(job, tally, ledger))
    except _Overtaken:
        return True
    except StoreError as error:
        if exists(job.store, SUCCESS_FILE):
            return True
        if is_transient(error) or job.pending():  # what was being written was swept, or a part has gone since
            return False
        raise
    ledger.close()
    counts = dict(tally.statuses)
    if sum(counts.values()) != job.num_rows:
        raise JobError(f"{job.job_id}: {sum(counts.values())} rows came out of {job.num_rows}: {counts}")
    success = Success(
        job_id=job.job_id,
        state=JobState.FAILED if job.is_aborted() else final_state(counts),
        num_rows=job.num_rows,
        counts=counts,
        outputs=outputs,
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        num_copied=job.num_copied(),
        commonest_error=tally.commonest_error(),
        throughput=measure_throughput(job.provenances()),
    )
    with suppress(AlreadyExists):
        job.store.create(SUCCESS_FILE, encode_json(success))
        job.store.sweep(0.0)  # what killed writers left; whoever still writes is late, and takes that
    return True


def finish_or_fail(job: Job) -> bool:
    """Try to finish; what only a person can mend, such as a damaged part or a changed input, fails the job too.

    Raises JobError or InputDataError then, and StoreError, which another try may cure.
    """
    try:
        return try_finish(job)
    except (JobError, InputDataError) as error:
        job.fail(str(error))
        raise


def final_state(counts: dict[RowStatus, int]) -> JobState:
    """Return how a job with these rows ended: failed if rows were asked about and none got a label."""
    num_bad = sum(count for status, count in counts.items() if status not in GOOD)
    num_labelled = counts.get(RowStatus.OK, 0) + counts.get(RowStatus.CLOSED, 0)
    if num_bad == 0:
        return JobState.DONE
    return JobState.DONE_WITH_ERRORS if num_labelled else JobState.FAILED


class _Overtaken(Exception):
    """Another finisher was first: files that readers have by now are not replaced, not even by equal ones."""


class _Tally:
    """Counts over the rows that were written; owned by one finisher."""

    def __init__(self) -> None:
        self.statuses: Counter[RowStatus] = Counter()
        self.errors: Counter[str] = Counter()

    def add(self, statuses: pa.ChunkedArray, errors: pa.ChunkedArray) -> None:
        """Count the rows of one chunk."""
        self.statuses.update(RowStatus(status) for status in statuses.to_pylist())
        if errors.null_count == len(errors):
            return
        for status, error in zip(statuses.to_pylist(), errors.to_pylist(), strict=True):
            if error is not None and len(self.errors) < MAX_ERROR_KINDS:
                self.errors[f"{status}: {error}"] += 1

    def commonest_error(self) -> str | None:
        """Return the commonest status and error, with how often it came."""
        if not self.errors:
            return None
        text, count = self.errors.most_common(1)[0]
        return f"{text} ({count} rows)"


def _write_outputs(job: Job, tally: _Tally, ledger: LedgerWriter) -> Iterator[OutputFile]:
    """Write one output file for each input file that has rows in the job, or that is empty itself."""
    store, prefix = output_store(job)
    chunks_of = {index: list(chunks) for index, chunks in groupby(job.chunks, key=lambda chunk: chunk.input_index)}
    with closing(ChunkReader()) as reader:
        for index, name in enumerate(shard_names(job.spec.inputs)):
            chunks = chunks_of.get(index, [])
            if not chunks and job.spec.inputs[index].num_rows:
                continue  # beyond --limit
            yield _write_output(job, store, prefix + name, _labelled_chunks(job, chunks, reader, tally, ledger))
    store.sweep()


def _write_output(job: Job, store: Store, key: str, tables: Iterable[pa.Table]) -> OutputFile:
    """Stream one output file; memory holds one row group."""
    _refuse_foreign(job, store, key)
    num_rows, schema = 0, output_schema(job)
    # an exception still writes a footer, into a file that the store then throws away
    with store.open_writer(key) as sink, pq.ParquetWriter(sink, schema, **WRITER_OPTIONS) as writer:
        for table in _row_groups(tables):
            writer.write_table(table, row_group_size=max(1, table.num_rows))
            num_rows += table.num_rows
        if exists(job.store, SUCCESS_FILE):
            raise _Overtaken
        _refuse_foreign(job, store, key)  # again: writing takes minutes
    entry = store.stat(key)
    return OutputFile(uri=store.locate(key), num_rows=num_rows, size_bytes=entry.size_bytes if entry else 0)


def output_schema(job: Job) -> pa.Schema:
    """Return the columns of the output: the input's kept ones as they were, then the job's."""
    kept = job.input_schema.names if job.spec.columns is None else job.spec.columns
    fields = [job.input_schema.field(name) for name in kept] + result_fields(job.spec)
    own = {JOB_KEY: job.job_id, DETERMINISTIC_KEY: str(job.spec.model.deterministic).lower()}
    return pa.schema(fields, {**(job.input_schema.metadata or {}), **own})


def _labelled_chunks(
    job: Job, chunks: list[Chunk], reader: ChunkReader, tally: _Tally, ledger: LedgerWriter
) -> Iterator[pa.Table]:
    """Yield each chunk's input rows with its results beside them."""
    schema, names = output_schema(job), output_names(job.spec.output_column)
    added = [field.name for field in result_fields(job.spec)]
    kept = [name for name in schema.names if name not in added]
    for chunk in chunks:
        results = job.read_part(chunk.index)
        numbers = results[row_column(job.spec.output_column)].to_pylist()
        if numbers != list(range(chunk.start_row, chunk.start_row + chunk.num_rows)):
            raise JobError(f"part {chunk.index} of {job.job_id} does not hold its rows: delete it and resume the job")
        tally.add(results[names.status], results[names.error])
        ledger.add(chunk.index, results)
        rows = pa.Table.from_batches(job.read_batches(chunk, kept, reader)).columns if kept else []
        yield pa.Table.from_arrays([*rows, *(results[name] for name in added)], schema=schema)


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Gather chunks into row groups that are neither many nor large."""
    held: list[pa.Table] = []
    num_rows = num_bytes = 0
    for table in tables:
        held.append(table)
        num_rows, num_bytes = num_rows + table.num_rows, num_bytes + table.nbytes
        if num_rows >= ROW_GROUP_ROWS or num_bytes >= ROW_GROUP_BYTES:
            yield pa.concat_tables(held)
            held, num_rows, num_bytes = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _refuse_foreign(job: Job, store: Store, key: str) -> None:
    """Raise StoreError rather than replace a file that this job did not write."""
    if exists(store, key) and owner_of(store, key) != job.job_id:
        raise StoreError(f"{store.locate(key)} is not {job.job_id}'s: move it away, then resume the job")
