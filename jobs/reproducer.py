"""A row that the engine failed on, as a file: all that is needed to ask the same question again, elsewhere.

For people; nothing here reads it back. Knows no engine.
"""

from typing import Any

import msgspec
import structlog

from jobs.job import Job
from jobs.source import ChunkReader
from jobs.store import exists
from schemas.errors import AlreadyExists, NightmillError
from schemas.records import FORMAT_VERSION, Chunk, Constraint, ModelRef, Record, Request

REPRODUCERS = "reproducers"  # directory in the job's
MAX_REPRODUCERS = 32  # of one job: a broken device fails every row alike

log = structlog.get_logger(__name__)


class Reproducer(Record):
    """The content of the file. ``request`` has the rendered prompt, the sampling and the seed."""

    error: str
    input: str
    row_index: int
    row: dict[str, Any]
    request: Request
    constraint: Constraint | None
    model: ModelRef
    format_version: int = FORMAT_VERSION


def keep_reproducer(
    job: Job,
    chunk: Chunk,
    row_index: int,
    *,
    request: Request,
    constraint: Constraint | None,
    error: str,
    reader: ChunkReader | None = None,
) -> None:
    """Write the file of a failed row, unless it has one or there are enough; what goes wrong is only logged."""
    key = f"{REPRODUCERS}/input-{chunk.input_index:05d}-row-{row_index}.json"
    try:
        if exists(job.store, key) or len(job.store.list(REPRODUCERS)) >= MAX_REPRODUCERS:
            return
        alone = msgspec.structs.replace(chunk, start_row=row_index, num_rows=1)
        (row,) = job.read_rows(alone, job.input_schema.names, reader)
        found = Reproducer(
            error=error,
            input=job.spec.inputs[chunk.input_index].uri,
            row_index=row_index,
            row=row,
            request=request,
            constraint=constraint,
            model=job.spec.model,
        )
        job.store.create(key, msgspec.json.format(msgspec.json.encode(found, enc_hook=str)))
    except AlreadyExists:
        return
    except (NightmillError, UnicodeEncodeError) as failure:
        log.warning("reproducer_not_written", row=row_index, reason=str(failure))
        return
    log.error("row_failed", row=row_index, reason=error, reproducer=job.store.locate(key))
