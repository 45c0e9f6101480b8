"""``python -m jobs.export JOB --to PATH``: a finished job's output in the formats of other tools.

Reads the output files; a target appears whole or not at all. Knows no parts and no inputs.
"""

import base64
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import IO, Any

import click
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from jobs.cli import split_names, verb
from jobs.finish import output_schema
from jobs.job import Job, OutputFile
from jobs.locations import split_location
from jobs.openai_results import result_line
from jobs.partitions import write_partitioned
from jobs.source import python_rows
from jobs.store import Store, exists, open_input, open_store
from schemas.errors import InputDataError, JobError, StoreError
from schemas.settings import Settings

BATCH_ROWS = 4096
COPY_BYTES = 2**23

WriteFile = Callable[[Job, IO[bytes]], None]


def export(job: Job, form: str, location: str, *, partition_by: Sequence[str] = (), overwrite: bool = False) -> None:
    """Write the job's output to ``location`` as ``form``, one of ``FORMATS``; ``hive`` splits it by ``partition_by``.

    Raises JobError if the job has not ended, StoreError if the target exists (``overwrite``: it is replaced).
    """
    if job.success() is None:
        raise JobError(f"{job.job_id} has not ended ({job.state()}): there is nothing to export yet")
    if (form == "hive") != bool(partition_by):
        raise InputDataError("--partition-by goes with the format hive, and the other way round")
    if form == "openai-batch" and job.spec.body_column not in output_schema(job).names:
        raise JobError(f"the output of {job.job_id} has no request bodies: export it in another format")
    directory, name = (location, "") if form in ("hf", "hive") else split_location(location)
    store = open_store(directory)
    try:
        if form == "hf":
            _export_dataset(job, store, overwrite)
        elif form == "hive":
            _export_partitioned(job, store, partition_by, overwrite)
        else:
            _refuse_existing(store, name, overwrite)
            with store.open_writer(name) as sink:
                WRITERS[form](job, sink)
    finally:
        store.sweep()


def write_csv(job: Job, sink: IO[bytes]) -> None:
    """Write one CSV table with a header; nested values are JSON text, bytes are base64."""
    schema = pa.schema([pa.field(field.name, _csv_type(field.type)) for field in output_schema(job)])
    with pyarrow.csv.CSVWriter(sink, schema) as writer:
        for batch in _read_batches(job):
            arrays = [_csv_array(column, field.type) for column, field in zip(batch.columns, schema, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))


def write_jsonl(job: Job, sink: IO[bytes]) -> None:
    """Write one JSON object a row, keys in column order; bytes are base64, what JSON has no type for is text."""
    for batch in _read_batches(job):
        for row in python_rows(batch):
            sink.write(_to_json(row).encode() + b"\n")


def write_openai_batch(job: Job, sink: IO[bytes]) -> None:
    """Write one result line of the OpenAI batch API a row, each of which is such a request."""
    rows = (row for batch in _read_batches(job) for row in python_rows(batch))
    for number, row in enumerate(rows):
        sink.write(_to_json(result_line(job, row, number)).encode() + b"\n")


WRITERS: dict[str, WriteFile] = {"csv": write_csv, "jsonl": write_jsonl, "openai-batch": write_openai_batch}
FORMATS = (*WRITERS, "hf", "hive")
FILE_ENDINGS = frozenset(("xlsx", "xls", "json", "tsv", "txt", "parquet", "arrow", "feather", "gz", "zst", "zip"))
"""Of what nobody would call a directory."""


def _export_partitioned(job: Job, store: Store, columns: Sequence[str], overwrite: bool) -> None:
    """Write each output file's rows to hive directories, under a name of the file's own."""
    for number, file in enumerate(_output_files(job)):
        name = f"part-{number:05d}.parquet"
        write_partitioned(store, name, _read_file(file), output_schema(job), columns, overwrite=overwrite)


def _export_dataset(job: Job, store: Store, overwrite: bool) -> None:
    """Lay the output files out as a Hugging Face dataset: ``data/train-*.parquet`` and a card that names them."""
    _refuse_existing(store, "README.md", overwrite)
    files = _output_files(job)
    for number, file in enumerate(files):
        key = f"data/train-{number:05d}-of-{len(files):05d}.parquet"
        _refuse_existing(store, key, overwrite)
        with open_input(file.uri) as source, store.open_writer(key) as sink:
            shutil.copyfileobj(source, sink, COPY_BYTES)
    with store.open_writer("README.md") as sink:
        sink.write(_dataset_card(job, files).encode())


def _dataset_card(job: Job, files: list[OutputFile]) -> str:
    path = "data/train-*.parquet"
    counts = json.dumps({str(status): number for status, number in job.counts().items()})
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n\n"
        f"# {job.job_id}\n\n{sum(file.num_rows for file in files):,} rows labelled with Nightmill by "
        f"`{job.spec.model.name}` (digest `{job.spec.model.digest}`). Rows by status: `{counts}`.\n"
    )


def _refuse_existing(store: Store, key: str, overwrite: bool) -> None:
    if not overwrite and exists(store, key):
        raise StoreError(f"{store.locate(key)} exists: choose another --to, or pass --overwrite")


def _output_files(job: Job) -> list[OutputFile]:
    success = job.success()
    return [] if success is None else [file for file in success.outputs if file.num_rows]


def _read_batches(job: Job) -> Iterator[pa.RecordBatch]:
    for file in _output_files(job):
        yield from _read_file(file)


def _read_file(file: OutputFile) -> Iterator[pa.RecordBatch]:
    with open_input(file.uri) as source:
        yield from pq.ParquetFile(source).iter_batches(BATCH_ROWS)


def _csv_type(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_nested(kind) or _is_binary(kind) else kind


def _csv_array(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    texts = [
        None if value is None else base64.b64encode(value).decode() if isinstance(value, bytes) else _to_json(value)
        for value in column.to_pylist()
    ]
    return pa.array(texts, kind)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_encode_odd)


def _encode_odd(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def form_of(location: str) -> str:
    """The format that a file's ending means; a directory is a data set. Raises InputDataError for other files."""
    ending = PurePosixPath(location).suffix.lower().lstrip(".")
    if ending in FILE_ENDINGS:
        raise InputDataError(f"--to {location}: a file is .csv or .jsonl; else say --format {', '.join(FORMATS)}")
    return ending if ending in WRITERS else "hf"


@verb("export")
@click.argument("job")
@click.option("--to", "location", required=True, metavar="PATH", help="A file; for hf a directory. URIs too.")
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="[default: by the ending .csv or .jsonl, hive with --partition-by, else hf]",
)
@click.option("--partition-by", callback=split_names, metavar="A,B", help="Columns of the directories of hive.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
def main(
    settings: Settings,
    *,
    job: str,
    location: str,
    form: str | None,
    partition_by: tuple[str, ...] | None,
    overwrite: bool,
) -> None:
    """Write the output of JOB as CSV, JSON lines, OpenAI batch results, a Hugging Face data set or hive directories."""
    from jobs import api

    found = api.open_job(job, settings)
    form = form or ("hive" if partition_by else form_of(location))
    export(found, form, location, partition_by=partition_by or (), overwrite=overwrite)
    click.echo(f"{found.job_id}: {found.num_rows:,} rows as {form} in {location}")


if __name__ == "__main__":
    main()
