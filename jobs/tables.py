"""Input files of every format behind one protocol: what is in them, and their rows, forward, in bounded memory.

Knows no directories, no chunks and no prompts; ``jobs.lines`` has the formats that are text.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.lines import LINE_FORMATS, LineTable, scan_lines
from jobs.store import open_input
from schemas.errors import InputDataError
from schemas.records import InputFormat

MAX_BATCH_ROWS = 4096


class Scan(NamedTuple):
    """What a file holds: its columns, its rows, and how many bytes one takes on average, not compressed."""

    schema: pa.Schema
    num_rows: int
    row_bytes: int


class Table(Protocol):
    """An open file."""

    @property
    def names(self) -> Sequence[str]:
        """The wanted columns that it has."""

    def restart_row(self, row: int) -> int:
        """Return the last row up to ``row`` at which a fresh start costs no more than reading on to it."""

    def batches_near(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Start afresh at or before ``row``: the first row that comes, and all batches from there."""

    def close(self) -> None:
        """Close the file."""


def scan_table(uri: str, file_format: InputFormat) -> Scan:
    """Say what a file holds: Parquet by its footer, other formats by reading them. Raises InputDataError naming it."""
    if file_format in LINE_FORMATS:
        scan = Scan(*scan_lines(uri, file_format))
    elif file_format is InputFormat.ARROW:
        scan = _scan_arrow(uri)
    else:
        scan = _scan_parquet(uri)
    if twice := sorted(name for name, count in Counter(scan.schema.names).items() if count > 1):
        raise InputDataError(f"{uri} has several columns named {', '.join(map(repr, twice))}: rename them")
    return scan


def open_table(uri: str, file_format: InputFormat, wanted: pa.Schema, batch_bytes: int) -> Table:
    """Open a file for reading the columns of ``wanted``. Raises NotFound, InputDataError."""
    if file_format in LINE_FORMATS:
        return LineTable(uri, file_format, wanted, batch_bytes)
    if file_format is InputFormat.ARROW:
        return ArrowTable(uri, wanted.names)
    return ParquetTable(uri, wanted.names, batch_bytes)


class ParquetTable:
    """Starts at row groups; see ``Table``."""

    def __init__(self, uri: str, columns: Sequence[str], batch_bytes: int) -> None:
        self._file = _open_parquet(uri)
        self.names = [name for name in columns if name in self._file.schema_arrow.names]
        self._batch_bytes = batch_bytes
        metadata = self._file.metadata
        sizes = (metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
        self._group_starts: list[int] = list(itertools.accumulate(sizes, initial=0))

    def restart_row(self, row: int) -> int:
        """Return the start of the row's group."""
        return self._group_starts[self._group(row)]

    def batches_near(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Start at the row's group."""
        group = self._group(row)
        groups = range(group, self._file.metadata.num_row_groups)
        return self._group_starts[group], itertools.chain.from_iterable(map(self._read_group, groups))

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)

    def _group(self, row: int) -> int:
        return max(i for i, start in enumerate(self._group_starts) if start <= row)

    def _read_group(self, group: int) -> Iterator[pa.RecordBatch]:
        """Yield one row group's rows: a batch across two of them fails where a nested column has dictionaries."""
        rows = self._batch_rows(group)
        return self._file.iter_batches(rows, row_groups=[group], columns=self.names, use_threads=False)  # type: ignore[no-any-return]

    def _batch_rows(self, group: int) -> int:
        """How many rows fit into the read memory, from the footer's uncompressed sizes."""
        row_group = self._file.metadata.row_group(group)
        row_bytes = row_group.total_byte_size // max(1, row_group.num_rows) + 1
        return int(max(1, min(MAX_BATCH_ROWS, self._batch_bytes // row_bytes)))


class ArrowTable:
    """A stream or file of Arrow record batches, such as the datasets library saves; see ``Table``."""

    def __init__(self, uri: str, columns: Sequence[str]) -> None:
        self._uri = uri
        self._source, reader = _open_arrow(uri)
        self.names = [name for name in columns if name in reader.schema.names]

    def restart_row(self, row: int) -> int:
        """Return the file's start."""
        return 0

    def batches_near(self, row: int) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Start at the file's start: skipping a batch decodes nothing."""
        self._source.close()
        self._source, reader = _open_arrow(self._uri)
        return 0, (batch.select(self.names) for batch in _arrow_batches(reader))

    def close(self) -> None:
        """Close the file."""
        self._source.close()


def _scan_parquet(uri: str) -> Scan:
    file = _open_parquet(uri)
    schema, metadata = file.schema_arrow, file.metadata
    num_bytes = sum(metadata.row_group(index).total_byte_size for index in range(metadata.num_row_groups))
    file.close(force=True)
    return Scan(schema, metadata.num_rows, num_bytes // max(1, metadata.num_rows))


def _open_parquet(uri: str) -> pq.ParquetFile:
    source = open_input(uri)
    try:
        return pq.ParquetFile(source, pre_buffer=False, buffer_size=2**20, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        size = source.size()
        source.close()
        reason = "it is empty" if size == 0 else str(error).split("\n")[0]
        raise InputDataError(f"{uri} is not a readable Parquet file ({size} bytes): {reason}") from error


def _scan_arrow(uri: str) -> Scan:
    source, reader = _open_arrow(uri)
    num_rows = num_bytes = 0
    with closing(source):
        try:
            for batch in _arrow_batches(reader):
                num_rows += batch.num_rows
                num_bytes += batch.nbytes
        except (pa.ArrowException, OSError) as error:
            raise InputDataError(f"{uri} cannot be read after {num_rows} rows: {error}") from error
    return Scan(reader.schema, num_rows, num_bytes // max(1, num_rows))


def _open_arrow(uri: str) -> tuple[pa.NativeFile, pa.RecordBatchStreamReader | pa.RecordBatchFileReader]:
    source = open_input(uri)
    try:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        return source, pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as error:
        source.close()
        raise InputDataError(f"{uri} is not a readable Arrow file: {error}") from error


def _arrow_batches(reader: pa.RecordBatchStreamReader | pa.RecordBatchFileReader) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.RecordBatchFileReader):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)
