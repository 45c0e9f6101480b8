"""Input files that are text: JSON lines, CSV, and request lines of a batch API. A malformed line is a row that says so.

A line's number is its row, so nothing that a line holds moves another. Types of JSON columns come from all values;
values of several kinds make a column of JSON text, and CSV is text throughout. Knows no prompts.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from jobs.store import open_input
from schemas.errors import InputDataError
from schemas.records import InputFormat

MALFORMED = "\ufdd1malformed"
"""The column that says why a line is no row, null where it is one; a name that no file has."""

LINE_FORMATS = (InputFormat.JSONL, InputFormat.CSV, InputFormat.TSV, InputFormat.OPENAI_BATCH)
CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
SEPARATORS = {InputFormat.CSV: ",", InputFormat.TSV: "\t"}
BODY = "body"
BATCH_SCHEMA = pa.schema(dict.fromkeys(("custom_id", "method", "url", BODY), pa.string()))

READ_BYTES = 2**20
MAX_LINE_BYTES = 2**28
MAX_BATCH_ROWS, MAX_BATCH_BYTES = 4096, 2**22
MAX_FIELDS, MAX_DEPTH = 256, 32  # of a nested column; beyond them it is JSON text
SCALARS = {bool: pa.bool_(), float: pa.float64(), str: pa.string()}
INT64_RANGE, EXACT = range(-(2**63), 2**63), 2**53
SNIFFED_LINES = 100


class Line(NamedTuple):
    """A line as a row: its values by column, or why it is none."""

    values: dict[str, Any]
    error: str | None
    num_bytes: int


class LineTable:
    """Reads a file of lines forward; see ``jobs.tables.Table``."""

    def __init__(self, uri: str, file_format: InputFormat, wanted: pa.Schema, batch_bytes: int) -> None:
        self.names = wanted.names
        self._uri, self._format, self._schema = uri, file_format, wanted
        self._batch_bytes = min(batch_bytes, MAX_BATCH_BYTES)
        self._source = open_input(uri)

    def restart_row(self, row: int) -> int:
        """Return the file's start: only going back needs a fresh start."""
        return 0

    def batches_near(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Start at ``row``; the lines before it are passed over."""
        self._source.close()
        self._source = open_input(self._uri)
        lines = _lines(self._source, self._uri, self._format, skip=row)
        return row, (_batch(block, self._schema) for block in _blocks(lines, self._batch_bytes))

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def scan_lines(uri: str, file_format: InputFormat) -> tuple[pa.Schema, int, int]:
    """Return columns, number of rows and mean bytes of a row. Raises InputDataError for what is no file of lines."""
    num_rows = num_bytes = 0
    schema = BATCH_SCHEMA if file_format is InputFormat.OPENAI_BATCH else pa.schema([])
    with closing(open_input(uri)) as source:
        for block in _blocks(_lines(source, uri, file_format), MAX_BATCH_BYTES):
            num_rows += len(block)
            num_bytes += sum(line.num_bytes for line in block)
            if file_format is InputFormat.JSONL:
                schema = merge_inferred(schema, _infer_schema(block))
    if file_format in SEPARATORS:
        with closing(open_input(uri)) as source:
            header = next(_records(source, uri, file_format), ([], 0))[0]
        schema = pa.schema([pa.field(name, pa.string()) for name in header])
    return schema, num_rows, num_bytes // max(1, num_rows)


def is_openai_batch(uri: str) -> bool:
    """Say whether a file of JSON lines holds requests to a batch API: the first line that is an object decides."""
    with closing(open_input(uri)) as source:
        for _, line in zip(range(SNIFFED_LINES), _raw_lines(source, uri), strict=False):
            try:
                first = msgspec.json.decode(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(first, dict):
                return first.keys() >= {"custom_id", "body"} and first.keys() <= set(BATCH_SCHEMA.names)
    return False


def merge_inferred(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Merge columns whose types were inferred from values; what no type holds without a change is JSON text."""
    fields = {field.name: field for field in first}
    for field in second:
        known = fields.get(field.name, field)
        fields[field.name] = known.with_type(_merge(known.type, field.type))
    return pa.schema(list(fields.values()))


def _merge(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    schemas = [pa.schema({"x": kind}) for kind in (first, second)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return pa.string()


def _infer_schema(block: Sequence[Line]) -> pa.Schema:
    names = dict.fromkeys(name for line in block for name in line.values)
    kinds = {name: _infer_type([line.values.get(name) for line in block]) for name in names}
    return pa.schema({name: kind if kind is not None else pa.string() for name, kind in kinds.items()})


def _infer_type(values: Sequence[Any], depth: int = 0) -> pa.DataType | None:
    """Return the type that holds all values as they are, or None; Arrow's own inference takes false for 0.0."""
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    if len(kinds) <= 1 and not kinds & {int, list, dict}:
        return SCALARS[kinds.pop()] if kinds else pa.null()
    if kinds == {int}:
        return pa.int64() if all(value in INT64_RANGE for value in present) else None
    if kinds == {int, float}:
        return pa.float64() if all(isinstance(v, float) or abs(v) <= EXACT for v in present) else None
    if kinds == {list}:
        item = _infer_type([item for value in present for item in value], depth + 1) if depth < MAX_DEPTH else None
        return None if item is None else pa.list_(item)
    if kinds == {dict} and depth < MAX_DEPTH:
        return _infer_struct(present, depth)
    return None


def _infer_struct(values: Sequence[dict[str, Any]], depth: int) -> pa.DataType | None:
    """Parquet holds no object without keys, and columns for keys that are data would be endless."""
    names = dict.fromkeys(name for value in values for name in value)
    if not 0 < len(names) <= MAX_FIELDS:
        return None
    fields = {name: _infer_type([value.get(name) for value in values], depth + 1) for name in names}
    return None if None in fields.values() else pa.struct(list(fields.items()))


def _blocks(lines: Iterable[Line], batch_bytes: int) -> Iterator[list[Line]]:
    block: list[Line] = []
    num_bytes = 0
    for line in lines:
        block.append(line)
        num_bytes += line.num_bytes
        if len(block) >= MAX_BATCH_ROWS or num_bytes >= batch_bytes:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def _batch(block: Sequence[Line], schema: pa.Schema) -> pa.RecordBatch:
    errors = [line.error for line in block]
    arrays = [
        pa.array(errors, pa.string())
        if field.name == MALFORMED
        else _array([line.values.get(field.name) for line in block], field)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: list[Any], field: pa.Field) -> pa.Array:
    if field.type == pa.string():
        return pa.array([_text(value) for value in values], field.type)
    try:
        return pa.array(values, field.type)
    except pa.ArrowException:  # an integer that a column with fractions cannot hold exactly
        return pa.array(values).cast(field.type, safe=False)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lines(source: pa.NativeFile, uri: str, file_format: InputFormat, skip: int = 0) -> Iterator[Line]:
    """Yield the rows behind the first ``skip``; blank lines are none."""
    if file_format in SEPARATORS:
        records = _records(source, uri, file_format)
        header = next(records, ([], 0))[0]
        for number, (record, num_bytes) in enumerate(records):
            if number >= skip:
                yield _csv_line(header, record, num_bytes)
        return
    decode = _decode_request if file_format is InputFormat.OPENAI_BATCH else _decode_object
    for number, line in enumerate(_raw_lines(source, uri)):
        if number >= skip:
            yield Line(*decode(line), len(line))


def _raw_lines(source: pa.NativeFile, uri: str) -> Iterator[bytes]:
    rest = b""
    first = True
    for block in _decompressed(source, uri):
        data = rest + block
        if first:
            data, first = data.removeprefix(b"\xef\xbb\xbf"), False
            if data.lstrip().startswith(b"["):
                raise InputDataError(f"{uri} is one JSON array: write one object a line")
            if _is_one_object(data):
                raise InputDataError(f"{uri} is one JSON object: write one on each line (a schema goes with --schema)")
        *lines, rest = data.split(b"\n")
        yield from (line for line in lines if line.strip())
        if len(rest) > MAX_LINE_BYTES:
            raise InputDataError(f"{uri} has a line of more than {MAX_LINE_BYTES >> 20} MiB: is it a file of lines?")
    if rest.strip():
        yield rest


def _is_one_object(data: bytes) -> bool:
    """Whether the file's beginning is all of it, and one object that is spread over lines."""
    if b"\n" not in data.strip() or not data.lstrip().startswith(b"{"):
        return False
    try:
        msgspec.json.decode(data, type=dict[str, msgspec.Raw])  # of JSON lines it reads the first
    except (ValueError, RecursionError):
        return False
    return True


def _decompressed(source: pa.NativeFile, uri: str) -> Iterator[bytes]:
    codec = next((codec for suffix, codec in CODECS.items() if uri.lower().endswith(suffix)), None)
    stream = source if codec is None else pa.CompressedInputStream(source, codec)
    try:
        while block := stream.read(READ_BYTES):
            yield block
    except OSError as error:
        raise InputDataError(f"{uri} cannot be read: {error}") from error


def _decode_object(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError) as error:
        return {}, f"malformed line: {error}"
    if not isinstance(value, dict):
        return {}, f"malformed line: {type(value).__name__} instead of an object"
    return value, None


class _RequestLine(msgspec.Struct):
    """A line of a batch file; the body's text stays as it is."""

    custom_id: str
    body: msgspec.Raw
    method: str = "POST"
    url: str = "/v1/chat/completions"


_decode_request_line = msgspec.json.Decoder(_RequestLine).decode


def _decode_request(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        found = _decode_request_line(line)
        body = bytes(found.body).decode()
    except (ValueError, RecursionError) as error:
        values, malformed = _decode_object(line)
        custom_id = values.get("custom_id")
        known = {"custom_id": custom_id} if isinstance(custom_id, str) else {}
        return known, malformed or f"malformed line: {error}"
    return {"custom_id": found.custom_id, "method": found.method, "url": found.url, "body": body}, None


def _csv_line(header: Sequence[str], record: Sequence[str], num_bytes: int) -> Line:
    if len(record) != len(header):
        error = f"malformed line: {len(record)} fields, the header has {len(header)}"
        return Line({}, error, num_bytes)
    bad = next((name for name, text in zip(header, record, strict=True) if not text.isascii() and _is_broken(text)), "")
    if bad:
        return Line({}, f"malformed line: {bad} is not UTF-8", num_bytes)
    return Line(dict(zip(header, record, strict=True)), None, num_bytes)


def _is_broken(text: str) -> bool:
    return any("\udc80" <= character <= "\udcff" for character in text)


def _records(source: pa.NativeFile, uri: str, file_format: InputFormat) -> Iterator[tuple[list[str], int]]:
    """Yield the records of a CSV file and their size, the header first; bytes that are no UTF-8 are kept escaped."""
    csv.field_size_limit(MAX_LINE_BYTES)
    data = io.BufferedReader(_Stream(_decompressed(source, uri)))
    lines = io.TextIOWrapper(data, "utf-8-sig", "surrogateescape", newline="")
    try:
        for record in csv.reader(lines, delimiter=SEPARATORS[file_format]):
            if record:
                yield record, sum(map(len, record)) + len(record)
    except csv.Error as error:
        raise InputDataError(f"{uri} is not a table of text: {error}") from error


class _Stream(io.RawIOBase):
    """Blocks of bytes as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
