"""Input tables: which files, which columns, and the rows of a chunk in bounded memory.

Footers only until rows are asked for. Knows no prompts and no job directory.
"""

import difflib
import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.locations import find_files
from jobs.store import Entry, open_input, stat_input
from schemas.errors import InputDataError, JobError, NotFound
from schemas.records import InputFile

SUFFIXES = (".parquet", ".pq", ".parq")
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
NUM_FOOTER_THREADS = 8


class Inputs(NamedTuple):
    """The files of a job in row order, one schema that fits all of them, and how many bytes a row of each takes."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    row_bytes: tuple[int, ...]  # on average, encoded but not compressed


def scan_inputs(locations: Sequence[str]) -> Inputs:
    """Expand files, directories, globs and URIs, and read the footers.

    Each location's files come in name order, a file named twice comes once. Hive directories (``lang=de/``) become text
    columns. Raises InputDataError that names the file or the columns at fault.
    """
    entries = {entry.uri: entry for location in locations for entry in find_files(location, SUFFIXES)}
    if not entries:
        raise InputDataError(f"no Parquet file ({', '.join(SUFFIXES)}) in {', '.join(locations) or 'no location'}")
    with ThreadPoolExecutor(NUM_FOOTER_THREADS) as pool:
        footers = list(pool.map(_read_footer, entries.values()))
    files = tuple(_input_file(entry, footer.num_rows) for entry, footer in zip(entries.values(), footers, strict=True))
    schemas = [(file.uri, _with_partition(footer.schema, file)) for file, footer in zip(files, footers, strict=True)]
    return Inputs(files, unify_schemas(schemas), tuple(footer.row_bytes for footer in footers))


def scan_schema(files: Sequence[InputFile]) -> pa.Schema:
    """Read the footers of known files again and return the one schema that fits all of them."""
    with ThreadPoolExecutor(NUM_FOOTER_THREADS) as pool:
        footers = pool.map(lambda file: _read_footer(_current(file)), files)
        return unify_schemas(
            [(file.uri, _with_partition(footer.schema, file)) for file, footer in zip(files, footers, strict=True)]
        )


def unify_schemas(schemas: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Merge the files' columns in order of first appearance; a file that lacks one has nulls there.

    Raises InputDataError naming two files and types that contradict each other. Field and schema metadata are those of
    the first file that has them.
    """
    fields: dict[str, tuple[str, pa.Field]] = {}
    for uri, schema in schemas:
        for field in schema:
            first_uri, first = fields.setdefault(field.name, (uri, field))
            if (merged := _merge_types(first.type, field.type)) is None:
                raise InputDataError(
                    f"column {field.name!r} is {first.type} in {first_uri} but {field.type} in {uri}: "
                    "cast one of them, or submit the files as separate jobs"
                )
            is_nullable = first.nullable or field.nullable
            fields[field.name] = (first_uri, first.with_type(merged).with_nullable(is_nullable))
    num_files = Counter(name for _, schema in schemas for name in schema.names)
    columns = [
        field if num_files[field.name] == len(schemas) else field.with_nullable(True) for _, field in fields.values()
    ]
    return pa.schema(columns, schemas[0][1].metadata)


def check_columns(names: Iterable[str], schema: pa.Schema, used_by: str) -> None:
    """Raise InputDataError for a column that is not there, with those that are and the closest name."""
    for name in names:
        if name not in schema.names:
            close = difflib.get_close_matches(name, schema.names, 1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InputDataError(f"{used_by}: no column {name!r}; there are: {', '.join(schema.names)}.{hint}")


def _merge_types(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds both without changing a value, None if there is none."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    first, second = _plain_type(first), _plain_type(second)
    if first == second:
        return first
    for kinds, wide in (
        ((pa.string(), pa.large_string(), pa.string_view()), pa.large_string()),
        ((pa.binary(), pa.large_binary(), pa.binary_view()), pa.large_binary()),
    ):
        if first in kinds and second in kinds:
            return wide
    return None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


class _Footer(NamedTuple):
    schema: pa.Schema
    num_rows: int
    row_bytes: int


def _read_footer(entry: Entry) -> _Footer:
    file = _open_parquet(entry.uri)
    schema, metadata = file.schema_arrow, file.metadata
    num_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    file.close(force=True)
    twice = sorted(name for name, count in Counter(schema.names).items() if count > 1)
    if twice:
        raise InputDataError(f"{entry.uri} has several columns named {', '.join(map(repr, twice))}: rename them")
    return _Footer(schema, metadata.num_rows, num_bytes // max(1, metadata.num_rows))


def _open_parquet(uri: str) -> pq.ParquetFile:
    source = open_input(uri)
    try:
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=2**20, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        size = source.size()
        source.close()
        reason = "it is empty" if size == 0 else str(error).split("\n")[0]
        raise InputDataError(f"{uri} is not a readable Parquet file ({size} bytes): {reason}") from error


def _input_file(entry: Entry, num_rows: int) -> InputFile:
    parts = [part.partition("=") for part in entry.relative.split("/")[:-1] if "=" in part]
    partition = tuple((key, None if value == HIVE_NULL else unquote(value)) for key, _, value in parts)
    return InputFile(
        uri=entry.uri,
        size_bytes=entry.size_bytes,
        modified=entry.modified,
        num_rows=num_rows,
        partition=partition,
    )


def _with_partition(schema: pa.Schema, file: InputFile) -> pa.Schema:
    for name, _ in file.partition:
        if name not in schema.names:
            schema = schema.append(pa.field(name, pa.string()))
    return schema


def _current(file: InputFile) -> Entry:
    """Check that an input is as it was at submit. Raises JobError if not: its rows would not be the job's."""
    entry = stat_input(file.uri)
    if entry is None:
        raise JobError(f"input {file.uri} is gone since the job was submitted: put it back, or submit again")
    if (entry.size_bytes, entry.modified) != (file.size_bytes, file.modified):
        raise JobError(
            f"input {file.uri} changed since the job was submitted ({file.size_bytes} bytes then, "
            f"{entry.size_bytes} now): submit again for the new content"
        )
    return entry


class ChunkReader:
    """Reads runs of rows; a run that starts where the last one of its file ended goes on from there.

    So consecutive chunks decode a row group once. Threads share it; one reads at a time.
    """

    def __init__(self, read_batch_bytes: int = 64 * 2**20, max_open_files: int = 4) -> None:
        self._read_batch_bytes = read_batch_bytes
        self._max_open_files = max_open_files
        self._cursors: dict[tuple[str, tuple[str, ...]], _Cursor] = {}  # least recently used first
        self._lock = threading.Lock()

    def read(
        self, file: InputFile, schema: pa.Schema, start_row: int, num_rows: int, columns: Sequence[str]
    ) -> list[pa.RecordBatch]:
        """Return ``columns`` of the rows as batches in the types of ``schema``; what the file lacks is null.

        Raises JobError if the input changed since submit, InputDataError if it cannot be decoded.
        """
        key = (file.uri, tuple(columns))
        wanted = pa.schema([schema.field(name) for name in columns])
        with self._lock:
            _current(file)
            cursor = self._cursors.pop(key, None) or _Cursor(file, columns, self._read_batch_bytes)
            try:
                batches = list(cursor.take(start_row, num_rows))
            except (pa.ArrowException, OSError) as error:
                cursor.close()
                raise InputDataError(
                    f"{file.uri}: rows {start_row} to {start_row + num_rows} cannot be read: {error}"
                ) from error
            self._cursors[key] = cursor
            while len(self._cursors) > self._max_open_files:
                self._cursors.pop(next(iter(self._cursors))).close()
        return [_conform(batch, wanted, dict(file.partition)) for batch in batches]

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._cursors:
                self._cursors.popitem()[1].close()


class _Cursor:
    """A place in one file, for one set of columns; owned by a ChunkReader."""

    def __init__(self, file: InputFile, columns: Sequence[str], read_batch_bytes: int) -> None:
        try:
            self._file = _open_parquet(file.uri)
        except NotFound as error:
            raise JobError(f"input {file.uri} is gone since the job was submitted") from error
        self._columns = [name for name in columns if name in self._file.schema_arrow.names]
        self._read_batch_bytes = read_batch_bytes
        metadata = self._file.metadata
        self._group_starts = [0]
        for index in range(metadata.num_row_groups):
            self._group_starts.append(self._group_starts[-1] + metadata.row_group(index).num_rows)
        self._row = 0
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def take(self, start_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows, decoding forward from here if that is no longer than from the row group's start."""
        if not self._columns:
            yield pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=[""])  # only the number of rows counts
            return
        group = max(i for i, start in enumerate(self._group_starts) if start <= start_row)
        if not self._group_starts[group] <= self._row <= start_row or self._row == 0:
            self._seek(group)
        for _ in self._advance(start_row - self._row):
            pass
        yield from self._advance(num_rows)

    def close(self) -> None:
        self._file.close(force=True)

    def _seek(self, group: int) -> None:
        self._row, self._rest = self._group_starts[group], None
        groups = range(group, self._file.metadata.num_row_groups)
        self._batches = itertools.chain.from_iterable(map(self._read_group, groups))

    def _read_group(self, group: int) -> Iterator[pa.RecordBatch]:
        """Yield one row group's rows: a batch across two of them fails where a nested column has dictionaries."""
        rows = self._batch_rows(group)
        return self._file.iter_batches(rows, row_groups=[group], columns=self._columns, use_threads=False)  # type: ignore[no-any-return]

    def _batch_rows(self, group: int) -> int:
        """How many rows fit into the read memory, from the footer's uncompressed sizes."""
        row_group = self._file.metadata.row_group(group)
        row_bytes = row_group.total_byte_size // max(1, row_group.num_rows) + 1
        return int(max(1, min(4096, self._read_batch_bytes // row_bytes)))

    def _advance(self, num_rows: int) -> Iterator[pa.RecordBatch]:
        while num_rows > 0:
            batch = self._rest if self._rest is not None else next(self._batches, None)
            if batch is None:
                raise pa.ArrowInvalid(f"the file ends {num_rows} rows too early")
            head = batch.slice(0, num_rows)
            self._rest = batch.slice(num_rows) if batch.num_rows > num_rows else None
            self._row += head.num_rows
            num_rows -= head.num_rows
            if head.num_rows:
                yield head


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows as Python values. What Python cannot hold comes as text, text that is no UTF-8 as bytes."""
    try:
        return batch.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):  # one value must not cost the other rows
        columns = [list(map(_python_value, column)) for column in batch.columns]
        return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _python_value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.cast(pa.large_binary()).as_py() if not pa.types.is_nested(scalar.type) else b"?"
    except (ValueError, OverflowError):  # nanoseconds, years beyond 9999
        return pa.array([scalar], scalar.type).to_string(indent=0, skip_new_lines=True)[1:-1]


def _conform(batch: pa.RecordBatch, schema: pa.Schema, partition: dict[str, str | None]) -> pa.RecordBatch:
    """Give a batch the columns and types of ``schema``."""
    if not schema.names:
        return batch.select([])  # keeps the number of rows, which no empty list of arrays has
    arrays = []
    for field in schema:
        if field.name in batch.schema.names:
            arrays.append(_cast(batch.column(field.name), field.type))
        else:
            arrays.append(pa.repeat(pa.scalar(partition.get(field.name), field.type), batch.num_rows))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(kind)
