"""What need not be asked of a chunk: rows whose answer the ledger has, and rows that ask what an earlier chunk asks.

Chunks that are known as a whole are committed; of the others, the known rows are left beside the job for whoever runs
them. Only ever an aid: without those files every row is asked. Knows no engine.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from jobs.arrow_types import KEY_TYPE, key_column, output_names, part_schema, row_column
from jobs.job import Job, part_key
from jobs.ledger import REUSED, Found, Ledger, with_origin
from jobs.prompts import Prompt, PromptBuilder, Refusal
from jobs.source import ChunkReader
from schemas.errors import AlreadyExists, NotFound
from schemas.records import Chunk, JobSpec, RowResult, RowStatus

KNOWN, TWINS = "known", "twins"  # in the job's directory: files named like parts
ASKED_SCHEMA = pa.schema({"row": pa.int64(), "key": KEY_TYPE})
TWIN_SCHEMA = pa.schema([*ASKED_SCHEMA, pa.field("chunk", pa.int64()), pa.field("first_row", pa.int64())])

Numbers = npt.NDArray[Any]

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Known:
    """The rows of a chunk that need not be asked: those with an answer, and those whose answer is still computed."""

    table: pa.Table | None = None  # laid out as in a part
    statuses: dict[int, RowStatus] = field(default_factory=dict)  # of the table's rows
    waiting: frozenset[int] = frozenset()  # rows that an earlier chunk asks for, which has no part yet


def look_up(job: Job, chunks: Iterable[Chunk]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Commit those of the chunks that the ledger knows as a whole, note the known rows of the others.

    Yields each other chunk with the rows that must be asked (ASKED_SCHEMA).
    """
    builder, ledger = PromptBuilder(job.spec, job.input_schema), Ledger(job.root, job.spec)
    with closing(ChunkReader()) as reader:
        for chunk in chunks:
            built = list(map(builder.build, job.read_rows(chunk, builder.columns, reader)))
            asked = [(row, p.content_key) for row, p in enumerate(built, chunk.start_row) if isinstance(p, Prompt)]
            found = ledger.find([] if job.spec.refresh else [key for _, key in asked])
            known = _lay_out(job.spec, [asked[position] for position in found.positions], found)
            if known.num_rows == len(asked):
                job.commit_part(chunk.index, _refused_rows(chunk, built), known=known)
                continue
            _note(job, KNOWN, chunk, known)
            unknown = [asked[position] for position in np.delete(np.arange(len(asked)), found.positions)]
            keys = pa.array([bytes.fromhex(key) for _, key in unknown], KEY_TYPE)
            rows = pa.array([row for row, _ in unknown], pa.int64())
            yield chunk.index, pa.RecordBatch.from_arrays([rows, keys], schema=ASKED_SCHEMA)


def note_twins(job: Job, chunk_index: int, twins: pa.Table) -> None:
    """Leave beside the job which rows of a chunk wait for earlier chunks (TWIN_SCHEMA)."""
    _note(job, TWINS, job.chunks[chunk_index], twins)


def _refused_rows(chunk: Chunk, built: Sequence[Prompt | Refusal]) -> list[RowResult]:
    """Return the results of the rows that are not asked at all."""
    return [
        RowResult(row_index=row, status=refusal.status, error=refusal.error)
        for row, refusal in enumerate(built, chunk.start_row)
        if isinstance(refusal, Refusal)
    ]


def read_known(job: Job, index: int) -> Known:
    """Return what need not be asked of a chunk, as its directory says now."""
    known, waiting = _read_note(job, KNOWN, index), []
    tables = [] if known is None else [known]
    for chunk, twins in _by_chunk(_read_note(job, TWINS, index)):
        if job.is_committed(chunk):
            tables.append(_copy_twins(job, chunk, twins))
        else:
            waiting += twins["row"].to_pylist()
    if not tables:
        return Known(waiting=frozenset(waiting))
    table = pa.concat_tables(tables)
    rows, names = table[row_column(job.spec.output_column)].to_pylist(), output_names(job.spec.output_column)
    statuses = dict(zip(rows, map(RowStatus, table[names.status].to_pylist()), strict=True))
    return Known(table, statuses, frozenset(waiting))


class FirstAsked:
    """Where each question of a job comes first: 24 bytes a question, in sorted runs that are merged as they grow.

    Half a key stands for a whole one; whoever copies an answer compares the other half too.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Numbers, Numbers]] = []

    def add(self, chunk_index: int, asked: pa.RecordBatch) -> pa.Table:
        """Return the rows (of ASKED_SCHEMA) that ask what an earlier chunk asks, and remember the others."""
        rows = asked["row"].to_numpy()
        keys = np.frombuffer(b"".join(asked["key"].to_pylist()), ">u8")[::2].astype(np.uint64)
        places = np.full((len(rows), 2), -1)
        for run_keys, run_places in self._runs:
            at = np.minimum(np.searchsorted(run_keys, keys), len(run_keys) - 1)
            is_there = run_keys[at] == keys
            places[is_there] = run_places[at[is_there]]
        is_twin = places[:, 0] >= 0
        own_keys, first = np.unique(keys[~is_twin], return_index=True)
        if len(own_keys):
            own_rows = rows[~is_twin][first]
            self._append(own_keys, np.stack([np.full(len(own_rows), chunk_index), own_rows], axis=1))
        twins = pa.table(asked.filter(pa.array(is_twin)))
        for name, column in zip(("chunk", "first_row"), places[is_twin].T, strict=True):
            twins = twins.append_column(name, pa.array(column))
        return twins

    def _append(self, keys: Numbers, places: Numbers) -> None:
        while self._runs and len(self._runs[-1][0]) <= 2 * len(keys):
            last_keys, last_places = self._runs.pop()
            keys, places = np.concatenate([last_keys, keys]), np.concatenate([last_places, places])
            order = np.argsort(keys)
            keys, places = keys[order], places[order]
        self._runs.append((keys, places))


def _by_chunk(twins: pa.Table | None) -> Iterator[tuple[int, pa.Table]]:
    """Yield the chunks that ask for the twins, each with its own."""
    if twins is not None:
        for chunk in pc.unique(twins["chunk"]).to_pylist():
            yield chunk, twins.filter(pc.equal(twins["chunk"], chunk))


def _copy_twins(job: Job, chunk: int, twins: pa.Table) -> pa.Table:
    """Return the answers that a committed chunk has for rows of another; a row that failed there is not among them."""
    names, key = output_names(job.spec.output_column), key_column(job.spec.output_column)
    part = job.read_part(chunk)
    taken = part.take(pc.subtract(twins["first_row"], job.chunks[chunk].start_row)).combine_chunks()
    meta = with_origin(taken[names.meta].combine_chunks(), job.job_id)
    taken = taken.set_column(0, part.schema.field(0), twins["row"])
    taken = taken.set_column(taken.schema.get_field_index(names.meta), names.meta, meta)
    is_good = pc.is_in(taken[names.status], pa.array(list(map(str, REUSED))))
    return taken.filter(pc.and_(is_good, pc.equal(taken[key], twins["key"]))).cast(part_schema(job.spec))


def _lay_out(spec: JobSpec, asked: Sequence[tuple[int, str]], found: Found) -> pa.Table:
    """Give answers the columns of a part."""
    schema, names = part_schema(spec), output_names(spec.output_column)._asdict()
    columns = {
        row_column(spec.output_column): pa.array([row for row, _ in asked], pa.int64()),
        key_column(spec.output_column): pa.array([bytes.fromhex(key) for _, key in asked], KEY_TYPE),
        names["error"]: pa.nulls(len(asked), pa.string()),
        **{names[name]: found.answers[name] for name in found.answers.schema.names},
    }
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def _note(job: Job, directory: str, chunk: Chunk, table: pa.Table) -> None:
    if not table.num_rows:
        return
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    with suppress(AlreadyExists):  # of a submit that was interrupted
        job.store.create(part_key(chunk.index, directory), sink.getvalue())


def _read_note(job: Job, directory: str, index: int) -> pa.Table | None:
    key = part_key(index, directory)
    try:
        with job.store.open_reader(key) as source:
            return pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
    except NotFound:
        return None
    except (pa.ArrowException, OSError) as error:
        log.warning("known_rows_unusable", file=job.store.locate(key), reason=str(error))
        return None
