"""The jobs that a process works on, kept open: a job's plan and the footers of its parts are read once, not per chunk.

Knows no queue.
"""

import threading
from collections import OrderedDict

from jobs.job import JOB_FILE, JOB_NAME, Job
from jobs.store import Store
from schemas.errors import NotFound

MAX_OPEN = 8


class OpenJobs:
    """Opens jobs under one jobs root; threads share it and the jobs that it returns."""

    def __init__(self, root: Store) -> None:
        self._root = root
        self._jobs: OrderedDict[bytes, Job] = OrderedDict()  # by the content of the job file, which is written once
        self._lock = threading.Lock()

    def find(self, job_id: str) -> Job:
        """Open the job as ``Job.open`` does, and with its errors, unless it is open."""
        try:
            content = self._root.read(f"{job_id}/{JOB_FILE}") if JOB_NAME.fullmatch(job_id) else None
        except NotFound:
            content = None
        if content is None:
            return Job.open(self._root, job_id)  # which says what is wrong, or finds a job that was just submitted
        with self._lock:
            if (job := self._jobs.get(content)) is not None:
                self._jobs.move_to_end(content)
                return job
        job = Job.open(self._root, job_id)
        with self._lock:
            self._jobs[content] = job
            while len(self._jobs) > MAX_OPEN:
                self._jobs.popitem(last=False)
        return job
