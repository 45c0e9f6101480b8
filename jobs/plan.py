"""Inputs to chunks, and the plan file. Chunk boundaries never change an answer. Knows no prompts and no results."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from schemas.errors import InputDataError, JobError
from schemas.records import FORMAT_VERSION, Chunk, InputFile

PLAN_FIELDS = {"index": pa.int64(), "input_index": pa.int64(), "start_row": pa.int64(), "num_rows": pa.int64()}
START_AGAIN = "Put it back from a backup, or delete the job's directory and submit again"
VERSION_KEY, JOB_KEY, INPUT_SCHEMA_KEY = b"nightmill.format_version", b"nightmill.job_id", b"nightmill.input_schema"


class Plan(NamedTuple):
    """The chunks of a job and the columns of its input, one schema over all files."""

    chunks: tuple[Chunk, ...]
    input_schema: pa.Schema


def make_chunks(
    inputs: Sequence[InputFile],
    chunk_rows: int,
    limit: int | None = None,
    *,
    row_bytes: Sequence[int] | None = None,
    chunk_bytes: int = 0,
    canary_rows: int | None = None,
) -> tuple[Chunk, ...]:
    """Cut the first ``limit`` rows of the inputs into chunks of ``chunk_rows`` rows; none spans two files.

    With ``row_bytes``, the mean size of each input's rows, a chunk has fewer rows where they would exceed
    ``chunk_bytes``. With ``canary_rows``, the first chunk has so many, or the first file's if that has fewer.
    """
    if chunk_rows < 1 or (limit is not None and limit < 1):
        raise InputDataError(f"chunk_rows ({chunk_rows}) and limit ({limit}) must be at least 1")
    chunks: list[Chunk] = []
    rows_left = sum(file.num_rows for file in inputs) if limit is None else limit
    for input_index, file in enumerate(inputs):
        end = min(file.num_rows, rows_left)
        rows_left -= end
        step = chunk_rows if row_bytes is None else min(chunk_rows, chunk_bytes // max(1, row_bytes[input_index])) or 1
        start = 0
        while start < end:
            num_rows = min(step if chunks or canary_rows is None else canary_rows, end - start)
            chunks.append(Chunk(index=len(chunks), input_index=input_index, start_row=start, num_rows=num_rows))
            start += num_rows
    return tuple(chunks)


def encode_plan(job_id: str, plan: Plan) -> bytes:
    """Write the plan as a Parquet file whose metadata holds the format version, the job and the input's schema."""
    columns = {name: [getattr(chunk, name) for chunk in plan.chunks] for name in PLAN_FIELDS}
    metadata = {
        VERSION_KEY: str(FORMAT_VERSION).encode(),
        JOB_KEY: job_id.encode(),
        INPUT_SCHEMA_KEY: plan.input_schema.serialize().to_pybytes().hex().encode(),
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns, pa.schema(PLAN_FIELDS, metadata)), sink, compression="zstd")
    return sink.getvalue()


def decode_plan(job_id: str, data: bytes, where: str) -> Plan:
    """Read the plan file at ``where``. Raises JobError if it is another job's, newer than this program, or damaged."""
    try:
        # A Python file object would be left to Arrow's threads, and letting go of it in one while the interpreter ends
        # aborts the process: a worker that reads a plan and leaves did so once in ten times on a busy machine.
        table = pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        metadata = table.schema.metadata or {}
        version, owner = int(metadata[VERSION_KEY]), metadata[JOB_KEY].decode()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise JobError(f"{where} is damaged or no plan: {error}. {START_AGAIN}") from error
    check_format_version(where, version)
    if owner != job_id:
        raise JobError(f"{where} belongs to {owner}. {START_AGAIN}")
    columns = [table[name].to_pylist() for name in PLAN_FIELDS]
    chunks = tuple(
        Chunk(index=index, input_index=input_index, start_row=start_row, num_rows=num_rows)
        for index, input_index, start_row, num_rows in zip(*columns, strict=True)
    )
    return Plan(chunks, pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(metadata[INPUT_SCHEMA_KEY].decode()))))


def check_format_version(what: str, version: int) -> None:
    """Refuse a file that a newer Nightmill wrote. Raises JobError."""
    if version > FORMAT_VERSION:
        raise JobError(f"{what} has format version {version}, this Nightmill knows up to {FORMAT_VERSION}: update it")
