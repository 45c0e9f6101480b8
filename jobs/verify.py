"""``python -m jobs.verify JOB``: check a finished job's files against each other, its input and its constraint.

Reads everything, writes nothing, and uses nothing that the run computed but the files.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat

import click
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.arrow_types import output_names, result_fields
from jobs.cli import EXIT_FAILED, echo_json, verb
from jobs.finish import final_state, output_schema
from jobs.job import Job, OutputFile, Success
from jobs.outputs import output_store
from jobs.prompts import row_constraint
from jobs.source import ChunkReader
from jobs.store import open_input, stat_input
from schemas.constraints import Validator, make_validator
from schemas.errors import JobError, NightmillError, NotFound
from schemas.records import Chunk, Constraint, InputFile, JobState, RowStatus
from schemas.settings import Settings

MAX_SHOWN_FAULTS = 20
LABELLED = frozenset({RowStatus.OK, RowStatus.CLOSED})


@dataclass
class Report:
    """What was checked and what is wrong; grows while ``verify`` runs."""

    num_rows: int = 0
    num_validated: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def verify(job: Job) -> Report:
    """Check parts (checksums), outputs (rows, order, content), counts, and every label against the constraint.

    Raises JobError if the job has not ended.
    """
    success = job.success()
    if success is None:
        raise JobError(f"{job.job_id} has not ended ({job.state()}): there is nothing to verify yet")
    report, outputs = Report(), _output_files(job, success)
    with closing(ChunkReader()) as reader:  # of inputs and outputs: it keeps a place in each
        for chunk in job.chunks:
            try:
                report.faults += _verify_chunk(job, chunk, outputs.get(chunk.input_index), reader, report)
            except NightmillError as error:
                report.faults.append(f"chunk {chunk.index}: {error}")
    for file in success.outputs:
        report.faults += _verify_file(job, file)
    report.faults += _verify_counts(job, success, report)
    return report


def _output_files(job: Job, success: Success) -> dict[int, InputFile]:
    """The output files that hold rows, as inputs of a reader, by index of the input file."""
    files = {}
    indices = sorted({chunk.input_index for chunk in job.chunks})
    for input_index, file in zip(indices, (file for file in success.outputs if file.num_rows), strict=False):
        if (entry := stat_input(file.uri)) is not None:
            files[input_index] = InputFile(
                uri=file.uri, size_bytes=entry.size_bytes, modified=entry.modified, num_rows=file.num_rows
            )
    return files


def _verify_chunk(
    job: Job, chunk: Chunk, output: InputFile | None, reader: ChunkReader, report: Report
) -> Iterator[str]:
    """Yield the faults of one chunk's part and output rows."""
    part = job.read_part(chunk.index)
    names = output_names(job.spec.output_column)
    report.num_rows += part.num_rows
    report.counts.update(part[names.status].to_pylist())
    yield from _verify_labels(job, chunk, part, reader, report)
    if output is None:
        yield f"chunk {chunk.index}: its output file is gone"
        return
    schema = output_schema(job)
    batches = reader.read(output, schema, chunk.start_row, chunk.num_rows, schema.names)
    written = pa.Table.from_batches(batches, schema=schema)
    kept = [name for name in schema.names if name in job.input_schema.names]
    rows = job.read_batches(chunk, kept, reader) if kept else []
    for name in kept:
        expected = pa.chunked_array([batch.column(name) for batch in rows], schema.field(name).type)
        yield from _compare(written[name], expected, f"chunk {chunk.index}: column {name} differs from the input")
    for added in result_fields(job.spec):
        name = added.name
        yield from _compare(written[name], part[name], f"chunk {chunk.index}: column {name} differs from the part")


def _verify_file(job: Job, file: OutputFile) -> Iterator[str]:
    """Yield the faults that an output file has as a whole; a missing one is its chunks' fault."""
    try:
        with open_input(file.uri) as source:
            found = pq.ParquetFile(source)
            if found.metadata.num_rows != file.num_rows:
                yield f"{file.uri} has {found.metadata.num_rows} rows, written were {file.num_rows}"
            if found.schema_arrow.names != output_schema(job).names:
                yield f"{file.uri} has other columns than the job writes: {', '.join(found.schema_arrow.names)}"
    except (pa.ArrowException, OSError, NotFound) as error:
        yield f"{file.uri} cannot be read: {error}"


def _compare(written: pa.ChunkedArray, expected: pa.ChunkedArray, fault: str) -> Iterator[str]:
    """Yield ``fault`` unless the columns are equal; NaN equals NaN here."""
    if not written.equals(expected) and repr(written.to_pylist()) != repr(expected.to_pylist()):
        yield fault


def _verify_labels(job: Job, chunk: Chunk, part: pa.Table, reader: ChunkReader, report: Report) -> Iterator[str]:
    """Yield a fault for each labelled row whose text an independent validator refuses."""
    names = output_names(job.spec.output_column)
    statuses, raws = part[names.status].to_pylist(), part[names.raw].to_pylist()
    column = job.spec.constraint_column
    cells = (row[column] for row in job.read_rows(chunk, [column], reader)) if column else repeat(None)
    validators: dict[Constraint, Validator] = {}
    for offset, (status, cell) in enumerate(zip(statuses, cells, strict=False)):
        constraint = row_constraint(job.spec, cell) if column and status in LABELLED else job.spec.constraint
        if status not in LABELLED or constraint is None:
            continue
        if constraint not in validators:
            validators[constraint] = make_validator(constraint)
        report.num_validated += 1
        for text in raws[offset] if isinstance(raws[offset], list) else [raws[offset]]:
            problem = "it has no text" if text is None else validators[constraint].check(text)[1]
            if problem is not None:
                where = f"input {chunk.input_index} row {chunk.start_row + offset}"
                yield f"{where} is {status} but invalid: {problem}"


def _verify_counts(job: Job, success: Success, report: Report) -> Iterator[str]:
    recorded = {str(status): number for status, number in success.counts.items() if number}
    if dict(report.counts) != recorded:
        yield f"the parts count {json.dumps(report.counts)}, _SUCCESS.json {json.dumps(recorded)}"
    num_written = sum(file.num_rows for file in success.outputs)
    if not report.num_rows == num_written == success.num_rows == job.num_rows:
        yield f"the job has {job.num_rows} rows, its parts {report.num_rows}, its outputs {num_written}"
    state = JobState.FAILED if job.is_aborted() else final_state(success.counts)
    if success.state is not state:
        yield f"_SUCCESS.json says that the job is {success.state}, its rows say {state}"
    if job.output is None:  # elsewhere other jobs' files may lie beside it
        known = {file.uri for file in success.outputs}
        store, prefix = output_store(job)
        for name in store.list(prefix):
            if name[0] not in "._" and store.locate(prefix + name) not in known:
                yield f"{store.locate(prefix + name)} is none of the job's files, but readers of the directory take it"


@verb("verify")
@click.argument("job")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def main(settings: Settings, *, job: str, as_json: bool) -> int:
    """Check JOB: every row once and in order, checksums, and every label against its constraint."""
    from jobs import api

    found = api.open_job(job, settings)
    report = verify(found)
    if as_json:
        echo_json({"job_id": found.job_id, "is_sound": not report.faults, **vars(report)})
    else:
        click.echo(f"{found.job_id}: {report.num_rows:,} rows read, {report.num_validated:,} labels validated")
        for fault in report.faults[:MAX_SHOWN_FAULTS]:
            click.echo(f"  {fault}")
        hidden = len(report.faults) - MAX_SHOWN_FAULTS
        click.echo(f"{len(report.faults)} faults" + (f", {hidden} not shown" if hidden > 0 else ""))
    return EXIT_FAILED if report.faults else 0


if __name__ == "__main__":
    main()
