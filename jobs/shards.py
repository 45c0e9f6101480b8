"""Names of a job's output files and columns, and their clashes with the input's. Knows no job directory."""

from collections.abc import Sequence

import pyarrow as pa

from jobs.arrow_types import result_fields, row_column
from jobs.source import check_columns, split_suffix
from jobs.store import open_store
from schemas.errors import InputDataError, JobError
from schemas.records import InputFile, JobSpec


def check_output_columns(spec: JobSpec, input_schema: pa.Schema) -> None:
    """Refuse output columns that the input has, and kept or gold columns that it lacks. Raises InputDataError."""
    check_columns(spec.columns or (), input_schema, "--columns")
    if len(set(spec.columns or ())) < len(spec.columns or ()):
        raise InputDataError(f"--columns names a column twice: {', '.join(spec.columns or ())}")
    check_columns([spec.gold_column] if spec.gold_column else [], input_schema, "--gold")
    added = {row_column(spec.output_column), *(field.name for field in result_fields(spec))}
    taken = sorted(added & set(input_schema.names))
    if taken:
        raise InputDataError(
            f"the input has a column {', '.join(map(repr, taken))} already, which the job would add: "
            f"choose another name with --out (now {spec.output_column!r})"
        )


def shard_names(inputs: Sequence[InputFile]) -> tuple[str, ...]:
    """Return the name of each input's output file: the input's own, numbered where two share one."""
    names = [split_suffix(file.uri.rpartition("/")[2])[0] for file in inputs]
    is_unique = len({name.lower() for name in names}) == len(names)
    # names that begin with . or _ would be invisible to dataset readers
    safe = [name if name[:1] not in ("", ".", "_") else f"part{name}" for name in names]
    return tuple(f"{name}.parquet" if is_unique else f"{i:05d}-{name}.parquet" for i, name in enumerate(safe))


def check_output_place(inputs: Sequence[InputFile], output: str | None) -> None:
    """Refuse an output whose files would replace the input's. Raises JobError."""
    if output is None:
        return
    place = open_store(output)
    for file, name in zip(inputs, shard_names(inputs), strict=True):
        if place.locate(name) == file.uri:
            raise JobError(f"the output would overwrite the input {file.uri}: choose another --output")
