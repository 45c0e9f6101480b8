"""Where a job's output files go, and that no two jobs write one file. Knows no rows."""

import json

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.job import JOB_FILE, OUTPUT, Job
from jobs.shards import shard_names
from jobs.store import Store, absolute_location, open_store
from schemas.errors import InputDataError, StoreError
from schemas.records import JobSpec

JOB_KEY, DETERMINISTIC_KEY = b"nightmill.job_id", b"nightmill.deterministic"
"""In an output file's metadata; "false" says that other batches may have changed near-ties."""
"""Metadata of an output file: whose it is."""


def output_store(job: Job) -> tuple[Store, str]:
    """Return where the job's output files go: a store and the prefix of their keys in it."""
    return (job.store, f"{OUTPUT}/") if job.output is None else (open_store(job.output), "")


def check_output_is_free(spec: JobSpec, output: str, jobs: Store) -> None:
    """Refuse an output that holds another job's files, or that an unfinished job will write. Raises InputDataError."""
    names = set(shard_names(spec.inputs))
    place = open_store(output)
    for name in sorted(names.intersection(place.list())):
        if owner_of(place, name) != spec.job_id:
            raise InputDataError(f"{place.locate(name)} is not this job's: move it away, or choose another --output")
    for job_id in Job.list_ids(jobs):
        if job_id != spec.job_id and _goes_to(jobs, job_id) == absolute_location(output):
            _refuse_rival(Job.open(jobs, job_id), names, place)


def owner_of(store: Store, key: str) -> str | None:
    """Return the id of the job that wrote an output file, None if no job did."""
    with store.open_reader(key) as source:
        try:
            owner = (pq.ParquetFile(source).metadata.metadata or {}).get(JOB_KEY)
        except (pa.ArrowException, OSError):
            return None
    return None if owner is None else owner.decode()


def _goes_to(jobs: Store, job_id: str) -> str | None:
    """The output of a job, without reading more of it; None also if it cannot be read."""
    try:
        file = json.loads(jobs.read(f"{job_id}/{JOB_FILE}"))
    except (StoreError, ValueError):
        return None
    return file.get("output") if isinstance(file, dict) else None


def _refuse_rival(job: Job, names: set[str], place: Store) -> None:
    shared = sorted(names.intersection(shard_names(job.spec.inputs)))
    if shared and job.success() is None and not job.is_cancelled():
        raise InputDataError(
            f"{place.locate(shared[0])} will be written by {job.job_id}, which has not ended: "
            "choose another --output, or cancel that job"
        )
