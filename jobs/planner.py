"""Before a new job is seen by anybody: commit what needs no engine, and find the rows that ask the same.

A big job's rows are rendered and looked up in several processes: ``python -m jobs.planner`` is one of them, told on
stdin which chunks are its own. The answers come back as an Arrow stream. Knows no queue.
"""

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, pairwise

import pyarrow as pa

from jobs.cli import run_reporting_errors
from jobs.job import PLAN_FILE, Job, JobFile
from jobs.ledger import Ledger
from jobs.plan import decode_plan
from jobs.reuse import ASKED_SCHEMA, FirstAsked, look_up, note_twins
from jobs.store import open_store
from schemas.errors import JobError
from schemas.log import configure_logging
from schemas.records import Record, decode_json, encode_json

PROCESS_ROWS = 50_000
"""Rows that are worth a process: some two seconds of work, and a third of one to start it."""

MAX_PROCESSES = 16
CHUNK_KEY = b"chunk"


class Share(Record):
    """What one process is told: a job that has no job.json yet, and the chunks to look up."""

    root: str
    file: JobFile
    first_chunk: int
    end_chunk: int


def copy_known_rows(job: Job, process_rows: int = PROCESS_ROWS) -> None:
    """Commit the chunks of a new job that the ledger knows, and note the known rows and the twins of the others."""
    ledger, first_asked = Ledger(job.root, job.spec), FirstAsked()
    if len(job.chunks) < 2 and (job.spec.refresh or not ledger):
        return
    if ledger:
        ledger.mark_used()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_processes = min(MAX_PROCESSES, num_cores, job.num_rows // process_rows, len(job.chunks))
    is_shared = not job.root.locate("").startswith("memory:")
    looked_up = _look_up_apart(job, num_processes) if num_processes > 1 and is_shared else look_up(job, job.chunks)
    for chunk_index, asked in looked_up:
        note_twins(job, chunk_index, first_asked.add(chunk_index, asked))


def _look_up_apart(job: Job, num_processes: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Look up in processes, each with neighbouring chunks; yield in the order of the chunks."""
    bounds = [len(job.chunks) * number // num_processes for number in range(num_processes + 1)]
    shares = [
        Share(root=job.root.locate(""), file=job.file, first_chunk=first, end_chunk=end)
        for first, end in pairwise(bounds)
    ]
    with ThreadPoolExecutor(num_processes) as pool:
        yield from chain.from_iterable(map(_read_stream, pool.map(_run_process, shares)))


def _run_process(share: Share) -> bytes:
    command = [sys.executable, "-m", "jobs.planner"]
    done = subprocess.run(command, input=encode_json(share), capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("error: ")
        raise JobError(f"{share.file.spec.job_id} cannot be planned: {reason}")
    return done.stdout


def _read_stream(data: bytes) -> Iterator[tuple[int, pa.RecordBatch]]:
    with pa.ipc.open_stream(data) as stream:
        for batch, metadata in stream.iter_batches_with_custom_metadata():
            yield int(metadata[CHUNK_KEY]), batch


def _write_stream(found: Iterable[tuple[int, pa.RecordBatch]]) -> None:
    with pa.ipc.new_stream(sys.stdout.buffer, ASKED_SCHEMA) as stream:
        for chunk_index, asked in found:
            stream.write_batch(asked, custom_metadata={CHUNK_KEY: str(chunk_index).encode()})


def main() -> None:
    """Look up one share. What it logs goes to stderr: stdout has the answers."""
    configure_logging("WARNING")
    share = decode_json(sys.stdin.buffer.read(), Share)
    store = open_store(share.root)
    job_id = share.file.spec.job_id
    directory = store.within(job_id)
    job = Job(store, share.file, decode_plan(job_id, directory.read(PLAN_FILE), directory.locate(PLAN_FILE)))
    _write_stream(look_up(job, job.chunks[share.first_chunk : share.end_chunk]))


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
