"""Part files: the committed results of one chunk, with who wrote them and what is in them. Knows no directories."""

import functools
import hashlib
import importlib.metadata
import io
from collections import Counter
from collections.abc import Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.arrow_types import output_names, results_table, row_column
from jobs.plan import check_format_version
from jobs.provenance import Provenance
from schemas.errors import JobError
from schemas.records import FORMAT_VERSION, Chunk, JobSpec, Record, RowResult, RowStatus

INFO_KEY = b"nightmill.part"


class PartInfo(Record):
    """What a part says of itself in its footer."""

    job_id: str  # holds the hash of the whole spec: the job's fingerprint
    chunk: Chunk
    counts: dict[RowStatus, int]
    checksum: str  # over row numbers, statuses, labels and raw texts
    num_copied: int = 0  # rows whose answer was there before they were asked
    is_parked: bool = False
    history: tuple[str, ...] = ()  # of a parked part: when, and on which worker, each try began
    provenance: Provenance | None = None
    format_version: int = FORMAT_VERSION


def encode_part(
    spec: JobSpec,
    chunk: Chunk,
    rows: Sequence[RowResult],
    *,
    known: pa.Table | None = None,
    is_parked: bool = False,
    history: Sequence[str] = (),
    provenance: Provenance | None = None,
) -> bytes:
    """Write a chunk's results, ``known`` ones among them, as a Parquet file.

    Raises JobError unless they are exactly its rows, in order.
    """
    try:
        table = results_table(spec, chunk.index, rows, version())
    except (pa.ArrowException, OverflowError) as error:
        raise JobError(f"{spec.job_id} chunk {chunk.index}: a result does not fit its column: {error}") from error
    if known is not None:
        table = pa.concat_tables([table, known]).sort_by(row_column(spec.output_column)).combine_chunks()
    numbers = table[row_column(spec.output_column)].to_pylist()
    expected = range(chunk.start_row, chunk.start_row + chunk.num_rows)
    if numbers != list(expected):
        found = f"{len(numbers)} rows" if len(numbers) != chunk.num_rows else "others, or in another order"
        raise JobError(f"{spec.job_id} chunk {chunk.index} needs rows {expected.start} to {expected.stop}, got {found}")
    names = output_names(spec.output_column)
    info = PartInfo(
        job_id=spec.job_id,
        chunk=chunk,
        counts=dict(Counter(map(RowStatus, table[names.status].to_pylist()))),
        num_copied=table.num_rows - pc.struct_field(table[names.meta], "copied_from").null_count,
        checksum=_checksum(spec, table),
        is_parked=is_parked,
        history=tuple(history),
        provenance=provenance,
    )
    sink = io.BytesIO()
    table = table.replace_schema_metadata({INFO_KEY: msgspec.json.encode(info)})
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def read_part_info(source: pa.NativeFile, where: str) -> PartInfo:
    """Read a part's footer. Raises JobError if it is damaged or not a part."""
    try:
        metadata = pq.ParquetFile(source).metadata.metadata or {}
        raw = metadata[INFO_KEY]
        check_format_version(where, msgspec.json.decode(raw)["format_version"])
        return msgspec.json.decode(raw, type=PartInfo)
    except (pa.ArrowException, OSError, KeyError, msgspec.MsgspecError) as error:
        raise JobError(f"{where} is damaged or not a part of a job: {error}. Delete it and resume the job") from error


def read_part(source: pa.NativeFile, where: str, spec: JobSpec, chunk: Chunk) -> pa.Table:
    """Read a part and check that it is this job's, this chunk's and unharmed. Raises JobError."""
    info = read_part_info(source, where)
    source.seek(0)
    try:
        table = pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise JobError(f"{where} is damaged: {error}. Delete it and resume the job") from error
    faults = {
        f"it belongs to {info.job_id}": info.job_id != spec.job_id,
        f"it holds {info.chunk}, not {chunk}": info.chunk != chunk,
        "its content does not match its checksum": info.checksum != _checksum(spec, table),
    }
    if found := [text for text, is_fault in faults.items() if is_fault]:
        raise JobError(f"{where} cannot be used: {'; '.join(found)}. Delete it and resume the job")
    return table


def _checksum(spec: JobSpec, table: pa.Table) -> str:
    names = output_names(spec.output_column)
    checked = (row_column(spec.output_column), names.status, names.label, names.raw)
    columns = [table[name].to_pylist() for name in checked]
    return hashlib.sha256(msgspec.json.encode(columns)).hexdigest()


@functools.cache
def version() -> str:
    """The version of Nightmill that writes."""
    return importlib.metadata.version("nightmill")
