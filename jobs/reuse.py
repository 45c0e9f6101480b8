"""What a new job need not ask, since the ledger has it: whole chunks are committed before anybody works on the job.

The known rows of the other chunks are left beside the job for whoever runs them. Knows no engine.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from jobs.arrow_types import key_column, output_names, part_schema, row_column
from jobs.job import Job, part_key
from jobs.ledger import Found, Ledger
from jobs.prompts import Prompt, PromptBuilder, Refusal
from jobs.source import ChunkReader
from schemas.errors import AlreadyExists, NotFound
from schemas.records import Chunk, JobSpec, RowResult, RowStatus

KNOWN = "known"  # in the job's directory: the rows of chunks that are not known as a whole

log = structlog.get_logger(__name__)


def copy_known_rows(job: Job) -> None:
    """Commit the chunks of a new job that need no engine, and note the known rows of the others."""
    if job.spec.refresh or not (ledger := Ledger(job.root, job.spec)):
        return
    with closing(ChunkReader()) as reader:
        for chunk, built in build_prompts(job, reader):
            _copy_chunk(job, chunk, built, ledger)


def build_prompts(job: Job, reader: ChunkReader) -> Iterator[tuple[Chunk, list[Prompt | Refusal]]]:
    """Yield each chunk with what its rows ask."""
    builder = PromptBuilder(job.spec, job.input_schema)
    for chunk in job.chunks:
        yield chunk, list(map(builder.build, job.read_rows(chunk, builder.columns, reader)))


def read_known_rows(job: Job, index: int) -> pa.Table | None:
    """Return the rows of a chunk that need not be asked, laid out as in a part; None if there are none."""
    key = part_key(index, KNOWN)
    try:
        with job.store.open_reader(key) as source:
            return pq.ParquetFile(source, page_checksum_verification=True).read(use_threads=False)
    except NotFound:
        return None
    except (pa.ArrowException, OSError) as error:
        log.warning("known_rows_unusable", file=job.store.locate(key), reason=str(error))
        return None


def statuses_of(spec: JobSpec, known: pa.Table | None) -> dict[int, RowStatus]:
    """Return the status of each known row, by its number."""
    if known is None:
        return {}
    statuses = map(RowStatus, known[output_names(spec.output_column).status].to_pylist())
    return dict(zip(known[row_column(spec.output_column)].to_pylist(), statuses, strict=True))


def _copy_chunk(job: Job, chunk: Chunk, built: Sequence[Prompt | Refusal], ledger: Ledger) -> None:
    rows = enumerate(built, chunk.start_row)
    asked = [(row, prompt.content_key) for row, prompt in rows if isinstance(prompt, Prompt)]
    found = ledger.find([key for _, key in asked])
    if not len(found.positions):
        return
    known = _known_table(job.spec, [asked[position] for position in found.positions], found)
    if known.num_rows == len(asked):
        job.commit_part(chunk.index, refused_rows(chunk, built), known=known)
        return
    sink = io.BytesIO()
    pq.write_table(known, sink, compression="zstd", write_page_checksum=True)
    with suppress(AlreadyExists):  # of a submit that was interrupted
        job.store.create(part_key(chunk.index, KNOWN), sink.getvalue())


def refused_rows(chunk: Chunk, built: Sequence[Prompt | Refusal]) -> list[RowResult]:
    """Return the results of the rows that are not asked at all."""
    return [
        RowResult(row_index=row, status=refusal.status, error=refusal.error)
        for row, refusal in enumerate(built, chunk.start_row)
        if isinstance(refusal, Refusal)
    ]


def _known_table(spec: JobSpec, asked: Sequence[tuple[int, str]], found: Found) -> pa.Table:
    """Lay out answers as a part's rows."""
    schema = part_schema(spec)
    columns = {
        row_column(spec.output_column): pa.array([row for row, _ in asked], pa.int64()),
        key_column(spec.output_column): pa.array([bytes.fromhex(key) for _, key in asked], pa.binary(16)),
    }
    names = output_names(spec.output_column)._asdict()
    columns |= {names[name]: found.answers[name] for name in found.answers.schema.names}
    columns[names["error"]] = pa.nulls(len(asked), pa.string())
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
