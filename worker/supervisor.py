"""A worker's housekeeping thread: says that it serves its queue, keeps the embedded broker up, reconciles when idle.

Knows no engine: the pool tells whether the worker is idle.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from jobs.broker import ensure_broker
from jobs.finish import finish_or_fail
from jobs.job import SUCCESS_FILE, Job
from jobs.report import ensure_report
from jobs.store import exists
from schemas.errors import BrokerError, NightmillError
from schemas.records import JobState

log = structlog.get_logger(__name__)

ANNOUNCE_S = 5.0
UNFINISHED = (JobState.QUEUED, JobState.RUNNING)


class Supervisor(threading.Thread):
    """One per worker, owned by its pool; starts before the engine loads and ends when the pool begins to drain."""

    def __init__(self, app: Any, is_idle: Callable[[], bool]) -> None:
        super().__init__(name="supervisor", daemon=True)
        self._app = app
        self._is_idle = is_idle
        self._stopped = threading.Event()
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self.beat_s = time.monotonic()  # when it last went round
        self._others: set[str] = set()  # jobs of other queues
        self._complete: set[str] = set()  # jobs whose last part was there at the last look

    def run(self) -> None:
        """Work until ``stop``; a failure is logged and tried again."""
        interval_s = self._app.settings.worker.reconcile_interval_s
        reconcile_at = time.monotonic() + interval_s
        while True:
            self._attempt(self._announce)
            self._measure()
            self.beat_s = time.monotonic()
            if self._is_idle() and time.monotonic() >= reconcile_at:
                self._attempt(self._reconcile)
                reconcile_at = time.monotonic() + interval_s
            if self._stopped.wait(min(ANNOUNCE_S, interval_s)):
                break
        self._app.job_queue.withdraw(self._app.model.queue, self._name)

    def stop(self) -> None:
        """End, and count this worker no longer."""
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(ANNOUNCE_S)

    def fail_jobs(self, cause: str) -> None:
        """After ``stop``: the engine cannot start. If nobody else serves the queue, its jobs fail and say why."""
        self._attempt(partial(self._fail_jobs, cause))

    def _fail_jobs(self, cause: str) -> None:
        if self._app.job_queue.workers_serving(self._app.model.queue):
            return
        for job_id in Job.list_ids(self._app.store):
            self._attempt(partial(self._fail_job, job_id, cause))

    def _fail_job(self, job_id: str, cause: str) -> None:
        job = Job.open(self._app.store, job_id)
        if job.spec.model.queue == self._app.model.queue and job.state() in UNFINISHED:
            job.fail(cause)
            log.error("job_failed", job=job_id, reason=cause)

    def _announce(self) -> None:
        ensure_broker(self._app.settings)  # a dead embedded broker has nobody else to start it
        self._app.job_queue.announce(self._app.model.queue, self._name)

    def _measure(self) -> None:
        queue, name = self._app.job_queue, self._app.model.queue
        try:
            self._app.metrics.observe_queue(queue.depth(name), queue.oldest_wait_s(name))
        except BrokerError:
            self._app.metrics.miss_broker()

    def _reconcile(self) -> None:
        """Find unfinished jobs of this worker's queue; one idle worker per interval does it for all."""
        queue, name = self._app.job_queue, self._app.model.queue
        if queue.depth(name) or not queue.take_turn(name, self._app.settings.worker.reconcile_interval_s / 2):
            return
        for job_id in Job.list_ids(self._app.store):
            if job_id not in self._others and not self._stopped.is_set():
                self._attempt(partial(self._look_after, job_id))

    def _look_after(self, job_id: str) -> None:
        if exists(self._app.store, f"{job_id}/{SUCCESS_FILE}"):
            return
        job = Job.open(self._app.store, job_id)
        if job.spec.model.queue != self._app.model.queue:
            self._others.add(job_id)
        elif job.state() in UNFINISHED:
            if not job.pending():
                if job_id in self._complete:  # else whoever committed the last part is at it
                    finish_or_fail(job)
                    ensure_report(job, self._app.store, self._app.settings.jobs)
                self._complete.add(job_id)
            elif num_sent := self._app.job_queue.reconcile(job):
                log.info("chunks_requeued", job=job_id, chunks=num_sent)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except NightmillError as error:
            log.warning("housekeeping_failed", reason=str(error))
