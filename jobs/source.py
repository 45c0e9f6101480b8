"""Input tables: which files, which columns, and the rows of a chunk in bounded memory.

Knows no file format (``jobs.tables`` does), no prompts and no job directory.
"""

import difflib
import functools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from jobs.lines import CODECS, LINE_FORMATS, MALFORMED, is_openai_batch, merge_inferred
from jobs.locations import find_files
from jobs.store import Entry, stat_input
from jobs.tables import Scan, open_table, scan_table
from schemas.errors import InputDataError, JobError, NotFound
from schemas.records import InputFile, InputFormat

FORMATS = {
    ".parquet": InputFormat.PARQUET,
    ".parq": InputFormat.PARQUET,
    ".pq": InputFormat.PARQUET,
    ".arrow": InputFormat.ARROW,
    ".jsonl": InputFormat.JSONL,
    ".ndjson": InputFormat.JSONL,
    ".csv": InputFormat.CSV,
    ".tsv": InputFormat.TSV,
    ".json": InputFormat.JSONL,  # behind the others: directories of data sets have JSON files that describe them
}
"""By suffix, behind which one of ``CODECS`` may stand. A directory is read in the first of these that it has."""

SUFFIXES = (*FORMATS, *(suffix + codec for suffix, kind in FORMATS.items() if kind in LINE_FORMATS for codec in CODECS))
MALFORMED_FIELD = pa.field(MALFORMED, pa.string())
CACHED = "cache-"  # what the datasets library puts beside its Arrow files
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
NUM_SCAN_THREADS = 8


class Inputs(NamedTuple):
    """The files of a job in row order, one schema that fits all of them, and how many bytes a row of each takes."""

    files: tuple[InputFile, ...]
    schema: pa.Schema
    row_bytes: tuple[int, ...]  # on average, encoded but not compressed


def scan_inputs(locations: Sequence[str]) -> Inputs:
    """Expand files, directories, globs and URIs, and read what says how many rows they have: of Parquet, the footers.

    Each location's files come in name order, a file named twice comes once. Hive directories (``lang=de/``) become text
    columns. Raises InputDataError that names the file or the columns at fault.
    """
    entries = {entry.uri: entry for location in locations for entry in _find(location)}
    if not entries:
        raise InputDataError(f"no data file ({', '.join(FORMATS)}) in {', '.join(locations) or 'no location'}")
    formats = [_sniff(entry.uri) for entry in entries.values()]
    if len({kind is InputFormat.OPENAI_BATCH for kind in formats}) > 1:
        raise InputDataError("some inputs are lines of batch requests and some are not: submit them as separate jobs")
    with ThreadPoolExecutor(NUM_SCAN_THREADS) as pool:
        scans = list(pool.map(scan_table, entries, formats))
    files = tuple(
        _input_file(entry, scan.num_rows, kind)
        for entry, scan, kind in zip(entries.values(), scans, formats, strict=True)
    )
    return Inputs(files, _joint_schema(files, scans), tuple(scan.row_bytes for scan in scans))


def rescan_inputs(files: Sequence[InputFile]) -> Inputs:
    """Read known files again. Raises JobError if one is not as it was."""
    with ThreadPoolExecutor(NUM_SCAN_THREADS) as pool:
        scans = list(pool.map(lambda file: scan_table(_current(file).uri, file.format), files))
    return Inputs(tuple(files), _joint_schema(files, scans), tuple(scan.row_bytes for scan in scans))


def _find(location: str) -> list[Entry]:
    """Return a location's files; a directory's are those of one format."""
    found = find_files(location, SUFFIXES)
    below = [entry for entry in found if entry.relative and not entry.uri.rpartition("/")[2].startswith(CACHED)]
    if not below:
        return [entry for entry in found if not entry.relative]
    suffixes = {entry.uri: split_suffix(entry.uri)[1] for entry in below}
    first = FORMATS[min(suffixes.values(), key=list(FORMATS).index)]
    return [entry for entry in below if FORMATS[suffixes[entry.uri]] is first]


def split_suffix(uri: str) -> tuple[str, str]:
    """Split what stands before the suffixes of format and compression from the format's; "" if that is none."""
    plain = next((uri[: -len(codec)] for codec in CODECS if uri.lower().endswith(codec)), uri)
    suffix = next((suffix for suffix in FORMATS if plain.lower().endswith(suffix)), "")
    return (plain[: -len(suffix)], suffix) if suffix else (uri, "")


def _sniff(uri: str) -> InputFormat:
    kind = FORMATS.get(split_suffix(uri)[1], InputFormat.PARQUET)
    return InputFormat.OPENAI_BATCH if kind is InputFormat.JSONL and is_openai_batch(uri) else kind


def _joint_schema(files: Sequence[InputFile], scans: Sequence[Scan]) -> pa.Schema:
    """Unify the files' columns; types that were inferred from values widen where those of files contradict."""
    inferred = [scan.schema for file, scan in zip(files, scans, strict=True) if file.format is InputFormat.JSONL]
    wide = functools.reduce(merge_inferred, inferred, pa.schema([]))
    schemas = []
    for file, scan in zip(files, scans, strict=True):
        schema = scan.schema
        if file.format is InputFormat.JSONL:
            schema = pa.schema([wide.field(name) for name in schema.names])
        schemas.append((file.uri, _with_partition(schema, file)))
    return unify_schemas(schemas)


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


def _input_file(entry: Entry, num_rows: int, kind: InputFormat) -> InputFile:
    parts = [part.partition("=") for part in entry.relative.split("/")[:-1] if "=" in part]
    partition = tuple((unquote(key), None if value == HIVE_NULL else unquote(value)) for key, _, value in parts)
    return InputFile(
        uri=entry.uri,
        size_bytes=entry.size_bytes,
        modified=entry.modified,
        num_rows=num_rows,
        partition=partition,
        format=kind,
    )


def _with_partition(schema: pa.Schema, file: InputFile) -> pa.Schema:
    for name, _ in file.partition:
        if name not in schema.names:
            schema = schema.append(pa.field(name, pa.string()))
        elif file.format in LINE_FORMATS:
            schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
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
        wanted = pa.schema([MALFORMED_FIELD if name == MALFORMED else schema.field(name) for name in columns])
        with self._lock:
            _current(file)
            cursor = self._cursors.pop(key, None) or _Cursor(file, wanted, self._read_batch_bytes)
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

    def __init__(self, file: InputFile, wanted: pa.Schema, read_batch_bytes: int) -> None:
        if file.format in LINE_FORMATS:  # a line has every column, so what the directory says must not be asked of it
            wanted = pa.schema([field for field in wanted if field.name not in dict(file.partition)])
        try:
            self._table = open_table(file.uri, file.format, wanted, read_batch_bytes)
        except NotFound as error:
            raise JobError(f"input {file.uri} is gone since the job was submitted") from error
        self._row = -1
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._rest: pa.RecordBatch | None = None

    def take(self, start_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows, reading forward from here if that is no longer than from a fresh start."""
        if not self._table.names:
            yield pa.RecordBatch.from_arrays([pa.nulls(num_rows)], names=[""])  # only the number of rows counts
            return
        if not self._table.restart_row(start_row) <= self._row <= start_row:
            self._row, self._batches = self._table.batches_near(start_row)
            self._rest = None
        for _ in self._advance(start_row - self._row):
            pass
        yield from self._advance(num_rows)

    def close(self) -> None:
        self._table.close()

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
