"""Labels of earlier jobs, by what was asked: rows that ask the same again are copied instead of computed.

One directory a *scope*: all of a job's spec that changes an answer, but for the prompt and the row's own constraint,
which are the content key. A scope holds segments, Parquet files sorted by key that are created once and never changed.
Only ever an aid: a segment that is damaged, foreign or gone costs time, never a row.
"""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog

from jobs.arrow_types import key_column, label_column, output_names, result_types
from jobs.job import Job
from jobs.meta import META_TYPE
from jobs.store import Store, replace
from schemas.errors import AlreadyExists, JobError, NotFound, StoreError
from schemas.records import FORMAT_VERSION, JobSpec, RowStatus, short_hash

LEDGER = "_ledger"  # in the jobs root
SUFFIX, USED_FILE = ".parquet", "used"
ANSWERS_VERSION = "1"
"""Raise it when this program would answer the same question otherwise: what older ones answered is asked again."""

ROUTING_FIELDS = {
    *("name", "inputs", "where", "limit", "refresh", "slot"),
    *("prompt_template", "prompt_column", "messages_column", "body_column", "system"),
    *("constraint_column", "constraint_column_kind"),
    *("output_column", "gold_column", "columns", "format_version"),
}
"""Fields of JobSpec that say which rows are asked what; the content key has what came of them. All others are scope."""

REUSED = (RowStatus.OK, RowStatus.CLOSED)
SEGMENT_BYTES = 16 * 2**20
"""Of labels in memory, before they become a segment."""

ROW_GROUP_ROWS = 8_192
SMALL_BYTES, NUM_SMALL, MAX_MERGED = 2**20, 8, 16
"""So many small files side by side become one; at most so many at once."""

CACHE_BYTES = 256 * 2**20
VERSION_KEY = b"nightmill.format_version"
KEYS = ("key_high", "key_low")

Numbers = npt.NDArray[Any]
T = TypeVar("T")

log = structlog.get_logger(__name__)


class Found(NamedTuple):
    """What a ledger knows of some keys: ``positions`` among them, ascending, and the answers in that order."""

    positions: Numbers
    answers: pa.Table  # of _answer_schema; meta.copied_from tells the job


class Ledger:
    """The answers of one scope; owned by one thread. Memory is bounded by ``cache_bytes`` and a segment."""

    def __init__(self, root: Store, spec: JobSpec, cache_bytes: int = CACHE_BYTES) -> None:
        """``root`` is the jobs root."""
        self._store = root.within(LEDGER).within(scope_of(spec))
        self._schema = _answer_schema(spec)
        self._names = _list_segments(self._store)
        self._keys: _Cache[tuple[Numbers, Numbers]] = _Cache(cache_bytes // 2)
        self._groups: _Cache[pa.Table] = _Cache(cache_bytes // 2)

    def __bool__(self) -> bool:
        return bool(self._names)

    def mark_used(self) -> None:
        """Leave the time: a scope that nobody asks any more can go."""
        try:
            replace(self._store, USED_FILE, b"")
        except StoreError as error:
            log.warning("ledger_not_marked", reason=str(error))

    def find(self, keys: Sequence[str]) -> Found:
        """Look up content keys; the newest answer counts."""
        high, low = _split_keys(b"".join(map(bytes.fromhex, keys)))
        wanted = np.arange(len(keys))
        positions, tables = [wanted[:0]], [self._schema.empty_table()]
        for name in list(self._names):
            if not len(wanted):
                break
            try:
                is_there, rows = _search(self._load_keys(name), high[wanted], low[wanted])
                if len(rows):
                    tables.append(self._take(name, rows))
                    positions.append(wanted[is_there])
                    wanted = wanted[~is_there]
            except NotFound:  # merged with others meanwhile
                self._names = _list_segments(self._store)
                return self.find(keys)
            except (StoreError, pa.ArrowException, OSError, KeyError, ValueError) as error:
                log.warning("ledger_segment_unusable", segment=self._store.locate(name), reason=str(error))
                self._names.remove(name)
        order = np.argsort(np.concatenate(positions))
        return Found(np.concatenate(positions)[order], pa.concat_tables(tables).take(order))

    def _load_keys(self, name: str) -> tuple[Numbers, Numbers]:
        def load() -> tuple[tuple[Numbers, Numbers], int]:
            with self._store.open_reader(name) as source:
                table = _open_segment(source).read(columns=list(KEYS), use_threads=False)
            keys = _keys_of(table)
            return keys, keys[0].nbytes + keys[1].nbytes

        return self._keys.get(name, load)

    def _take(self, name: str, rows: Numbers) -> pa.Table:
        """Read the row groups that hold ``rows``, and return those rows in their order."""
        groups, offsets = np.unique(rows // ROW_GROUP_ROWS, return_inverse=True)
        with self._store.open_reader(name) as source:
            file = _open_segment(source)
            tables = [self._load_group(name, file, int(group)) for group in groups]
        starts = np.cumsum([0, *(table.num_rows for table in tables)])
        return pa.concat_tables(tables).take(starts[offsets] + rows % ROW_GROUP_ROWS)

    def _load_group(self, name: str, file: pq.ParquetFile, group: int) -> pa.Table:
        def load() -> tuple[pa.Table, int]:
            table = file.read_row_group(group, columns=self._schema.names, use_threads=False)
            return (table := _conform(table, self._schema)), table.nbytes

        return self._groups.get(f"{name}:{group}", load)


class LedgerWriter:
    """Takes a job's parts in order and keeps the labels that the job computed. Does not raise if the store fails."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._store = job.root.within(LEDGER).within(scope_of(job.spec))
        self._schema = _answer_schema(job.spec)
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._contents: list[str] = []
        self._is_broken = False

    def add(self, chunk_index: int, part: pa.Table) -> None:
        """Keep what is good and new of a part."""
        names = output_names(self._job.spec.output_column)._asdict()
        key = key_column(self._job.spec.output_column)
        if self._is_broken or key not in part.schema.names:  # of an older version
            return
        is_new = pc.and_(
            pc.is_in(part[names["status"]], pa.array(list(map(str, REUSED)))),
            pc.is_null(pc.struct_field(part[names["meta"]], "copied_from")),
        )
        part = part.filter(pc.and_(is_new, pc.is_valid(part[key])))
        if not part.num_rows:
            return
        high, low = _split_keys(b"".join(part[key].to_pylist()))
        columns = {name: part[names[name]] for name in self._schema.names}
        columns["meta"] = with_origin(part[names["meta"]].combine_chunks(), self._job.job_id)
        self._held.append(pa.table({KEYS[0]: high, KEYS[1]: low, **columns}))
        self._held_bytes += self._held[-1].nbytes
        self._contents.append(f"{chunk_index}:{part.num_rows}")
        if self._held_bytes >= SEGMENT_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, and merge small segments."""
        try:
            self._flush()
            if not self._is_broken:
                compact(self._store)
        except (StoreError, pa.ArrowException, OSError, KeyError) as error:
            log.warning("ledger_not_compacted", reason=str(error))

    def _flush(self) -> None:
        tables, contents = self._held, self._contents
        self._held, self._contents, self._held_bytes = [], [], 0
        if not tables or self._is_broken:
            return
        created = "".join(filter(str.isdigit, self._job.created.partition("+")[0]))
        name = f"{created}-{self._job.job_id}-{short_hash(*contents, digits=8)}{SUFFIX}"
        try:
            _create_segment(self._store, name, tables)
        except StoreError as error:
            self._is_broken = True
            log.warning("ledger_not_written", reason=str(error))


def keep_answers(job: Job) -> None:
    """Put the labels of a job that ends before it is done into its ledger, as far as they can be read."""
    writer = LedgerWriter(job)
    for index in sorted(job.parts()):
        try:
            writer.add(index, job.read_part(index))
        except (StoreError, JobError) as error:
            log.warning("labels_not_kept", job=job.job_id, chunk=index, reason=str(error))
    writer.close()


def scope_of(spec: JobSpec) -> str:
    """Return the name of a job's scope: equal scopes and equal content keys have equal answers."""
    fields = {key: value for key, value in msgspec.to_builtins(spec).items() if key not in ROUTING_FIELDS}
    fields["model"] = {key: value for key, value in fields["model"].items() if key not in ("name", "revision")}
    return short_hash(
        ANSWERS_VERSION, msgspec.json.encode(fields, order="sorted").decode(), str(label_column(spec).type)
    )


def compact(store: Store) -> None:
    """Merge neighbours in time that are small; what they answered twice keeps the newest answer.

    Others may do the same at once: the merged segment's name tells what it is made of, and it is created before its
    sources go, so that a reader finds each row in one or the other.
    """
    for sources in _small_runs(store, _list_segments(store)):
        tables = []
        for name in sources:
            with store.open_reader(name) as source:
                tables.append(_open_segment(source).read(use_threads=False))
        newest = sources[0].partition("-")[0]
        merged = [_conform(table, tables[0].schema) for table in tables]
        _create_segment(store, f"{newest}-merged-{short_hash(*sources)}{SUFFIX}", merged)
        for name in sources:
            store.delete(name)


def _small_runs(store: Store, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield runs of neighbours: a segment between them would be newer than some of their rows and older than others."""
    sizes = {name: entry.size_bytes for name in names if (entry := store.stat(name)) is not None}
    for is_small, group in groupby(sizes, key=lambda name: sizes[name] < SMALL_BYTES):
        run = list(group)[:MAX_MERGED]
        if is_small and len(run) >= NUM_SMALL:
            yield run


def _create_segment(store: Store, name: str, tables: Sequence[pa.Table]) -> None:
    """Sort by key, keep the first of equal keys, and create the file; an equal one may be there already."""
    table = pa.concat_tables(tables)
    high, low = _keys_of(table)
    order = np.lexsort((low, high))  # stable
    high, low = high[order], low[order]
    is_first = np.append(True, (high[1:] != high[:-1]) | (low[1:] != low[:-1]))
    table = table.take(order[is_first]).replace_schema_metadata({VERSION_KEY: str(FORMAT_VERSION)})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", row_group_size=ROW_GROUP_ROWS, write_page_checksum=True)
    try:
        store.create(name, sink.getvalue())
    except AlreadyExists:
        log.debug("ledger_segment_was_there", segment=name)


def _open_segment(source: pa.NativeFile) -> pq.ParquetFile:
    """Open a segment. Raises ValueError if a newer Nightmill wrote it."""
    file = pq.ParquetFile(source, page_checksum_verification=True)
    version = int((file.metadata.metadata or {})[VERSION_KEY])
    if version > FORMAT_VERSION:
        raise ValueError(f"format version {version}, this Nightmill knows up to {FORMAT_VERSION}")
    return file


def _list_segments(store: Store) -> list[str]:
    """The newest first: names begin with the time at which their job was made."""
    return sorted((name for name in store.list() if name.endswith(SUFFIX)), reverse=True)


def _answer_schema(spec: JobSpec) -> pa.Schema:
    """The columns of answers, under their names in OutputNames; what is kept has no error."""
    return pa.schema([pa.field(name, kind) for name, kind in result_types(spec).items() if name != "error"])


def with_origin(meta: pa.StructArray, job_id: str) -> pa.StructArray:
    """Return meta values that say from which job they were copied."""
    arrays = [meta.field(field.name) for field in META_TYPE]
    arrays[META_TYPE.get_field_index("copied_from")] = pa.array([job_id] * len(meta), pa.string())
    return pa.StructArray.from_arrays(arrays, fields=list(META_TYPE))


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give answers the columns of ``schema``; what an older version did not note of a row is null."""
    if table.schema.equals(schema):
        return table
    columns = []
    for field in schema:
        column = table[field.name].combine_chunks()
        if field.name == "meta" and column.type != field.type:
            known = {each.name for each in column.type}
            arrays = [
                column.field(each.name).cast(each.type) if each.name in known else pa.nulls(len(column), each.type)
                for each in field.type
            ]
            column = pa.StructArray.from_arrays(arrays, fields=list(field.type))
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _split_keys(data: bytes) -> tuple[Numbers, Numbers]:
    """Sixteen bytes a key to two columns of numbers that sort as the bytes do."""
    halves = np.frombuffer(data, ">u8").reshape(-1, 2).astype(np.uint64)
    return np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1])


def _keys_of(table: pa.Table) -> tuple[Numbers, Numbers]:
    return table[KEYS[0]].to_numpy(), table[KEYS[1]].to_numpy()


def _search(keys: tuple[Numbers, Numbers], high: Numbers, low: Numbers) -> tuple[Numbers, Numbers]:
    """Return which of the wanted keys are there, and in which rows.

    Keys that share their first half and no more are taken for missing: they are asked, as if nobody had been.
    """
    rows = np.searchsorted(keys[0], high)
    rows[rows == len(keys[0])] = 0
    is_there = (keys[0][rows] == high) & (keys[1][rows] == low)
    return is_there, rows[is_there]


class _Cache(Generic[T]):
    """The values used last, up to so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: str, load: Callable[[], tuple[T, int]]) -> T:
        """Return the value of ``key``; ``load`` returns it and its size."""
        if key not in self._values:
            self._values[key] = load()
            self._num_bytes += self._values[key][1]
        self._values.move_to_end(key)
        while self._num_bytes > self._max_bytes and len(self._values) > 1:
            self._num_bytes -= self._values.popitem(last=False)[1][1]
        return self._values[key][0]
