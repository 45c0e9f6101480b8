"""A short run on a sample of a job's rows, to measure how fast it will be here. Only the ledger remembers it.

The sample is a small job of its own on the job's own queue, so what is measured is what will run.
"""

import io
import time
import uuid

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jobs import api
from jobs.forecast import Questions, Rate, choose_pieces
from jobs.job import Job
from jobs.pace import steady_rate
from jobs.prompts import Prompt
from jobs.provenance import measure_throughput
from jobs.source import scan_inputs
from jobs.store import open_store
from jobs.wait import Reporter
from schemas.errors import JobError
from schemas.records import JobState
from schemas.settings import Settings

SAMPLES, SAMPLE_FILE = "_samples", "rows.parquet"  # directories in the jobs root, each with one file
NUM_READ_PER_ROW = 4  # rows that are looked at for each one that is run
BASE_SPREAD = 0.15
"""By how much equal runs on one machine differ: ``ops.bench forecast``."""


def rehearse(prepared: api.Prepared, settings: Settings, num_rows: int, reporter: Reporter | None = None) -> Rate:
    """Run ``num_rows`` rows from all over the input and measure; a worker is started if need be, as for the job.

    Raises JobError if the sample does not run to its end, and whatever a submit raises.
    """
    root = open_store(settings.jobs_root)
    directory = root.within(SAMPLES).within(uuid.uuid4().hex)
    directory.create(SAMPLE_FILE, _sample_file(prepared, settings, num_rows))
    job: Job | None = None
    try:
        inputs = scan_inputs([directory.locate(SAMPLE_FILE)])
        spec = msgspec.structs.replace(
            prepared.spec, name="sample", inputs=inputs.files, limit=None, refresh=True, slot=None
        )
        job = api.submit(api.prepare_spec(spec, inputs, settings), settings)
        submitted_s = time.time()
        state = api.wait(job, settings, reporter)
        if state not in (JobState.DONE, JobState.DONE_WITH_ERRORS):
            failure = job.failure()
            raise JobError(f"the sample {state}: {failure.cause if failure else 'no row got a label'}")
        return _measure(job, submitted_s, time.time())
    finally:
        if job is not None:
            job.cancel()
            job.store.remove()
        directory.remove()


def _sample_file(prepared: api.Prepared, settings: Settings, num_rows: int) -> bytes:
    """Rows from all over the input that ask something new each: what is known or repeated takes no time."""
    schema, questions = prepared.plan.input_schema, Questions(prepared, settings)
    tables = [schema.empty_table()]
    for piece in choose_pieces(prepared.plan.chunks, NUM_READ_PER_ROW * num_rows):
        batches = questions.read(piece, schema.names)
        found, seen = questions.look(batches), set()
        is_new = []
        for item in found.built:
            key = item.content_key if isinstance(item, Prompt) else ""
            is_new.append(key in found.new and key not in seen)
            seen.add(key)
        tables.append(pa.Table.from_batches(batches, schema=schema).filter(pa.array(is_new, pa.bool_())))
    questions.close()
    rows = pa.concat_tables(tables)
    if not rows.num_rows:
        raise JobError("there is nothing to measure: every row looked at is known, skipped or refused")
    places = np.unique(np.linspace(0, rows.num_rows - 1, num_rows).round().astype(int))
    sink = io.BytesIO()
    pq.write_table(rows.take(places), sink)
    return sink.getvalue()


def _measure(job: Job, submitted_s: float, ended_s: float) -> Rate:
    """What a row takes while the batch is full; whatever else the run took, a job of any size will take once."""
    chunks, success = job.provenances(), job.success()
    whole, paces = measure_throughput(chunks), [chunk.pace for chunk in chunks if chunk.pace]
    steady = steady_rate(paces)
    if whole is None or success is None or steady is None or not whole.num_asked:
        raise JobError("no row of the sample was asked")
    tries = sum(pace.marks[-1].num_done for pace in paces) / whole.num_asked
    output_tokens = sum(pace.marks[-1].num_output_tokens for pace in paces) / whole.num_asked
    computed_tokens = tries * steady.prompt_tokens
    started_s, row_s = min(chunk.started_s for chunk in chunks), (computed_tokens + output_tokens) / steady.tokens_per_s
    return Rate(
        source=f"a run of {whole.num_asked} rows" + ("" if steady.is_steady else ", too few to fill its batch"),
        hardware=whole.hardware,
        tokens_per_s=steady.tokens_per_s / whole.num_workers,
        output_tokens=output_tokens,
        cached_share=1 - computed_tokens * whole.num_asked / max(1, whole.num_prompt_tokens),
        spread=BASE_SPREAD + 2 * steady.error,
        devices_per_worker=whole.num_devices / whole.num_workers,
        start_s=max(whole.start_s, started_s - submitted_s),
        fixed_s=max(0.0, ended_s - started_s - row_s * whole.num_asked),
        bytes_per_row=sum(file.size_bytes for file in success.outputs) / success.num_rows,
        num_answered=whole.num_asked,
    )
