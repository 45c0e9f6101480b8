"""Wait for a job's end: reconcile its chunks, keep a worker going in the embedded mode, try to finish it.

Decides from the job's files; Redis only adds hints. Knows no terminal: what happens goes to a Reporter.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from jobs.broker import ensure_broker
from jobs.finish import try_finish
from jobs.job import Job
from jobs.local_worker import LocalWorker, worker_command
from jobs.queue import Progress, Queue
from schemas.errors import BrokerError, EngineError
from schemas.records import JobState, RowStatus
from schemas.settings import Settings

POLL_S = 0.25
RATE_WINDOW_S = 30.0
MIN_RATE_TIME_S = 1.0  # a shorter time says nothing
ENDED = frozenset(JobState) - {JobState.QUEUED, JobState.RUNNING}


@dataclass(frozen=True)
class Snapshot:
    """Where a job stands at one moment. ``rows_per_s`` and ``eta_s`` are None until rows have come in.

    ``num_running`` chunks are in workers' hands, as far as the broker knows.
    """

    job_id: str
    num_rows: int
    num_chunks: int
    num_committed: int
    counts: Mapping[RowStatus, int]
    elapsed_s: float
    num_running: int = 0
    rows_per_s: float | None = None
    eta_s: float | None = None

    @property
    def num_done(self) -> int:
        """Rows with a result."""
        return sum(self.counts.values())

    @property
    def num_ok(self) -> int:
        """Rows whose status is ``ok``."""
        return self.counts.get(RowStatus.OK, 0)


class Reporter(Protocol):
    """Where a wait says what happens."""

    def update(self, snapshot: Snapshot) -> None:
        """Take the newest snapshot."""

    def note(self, text: str) -> None:
        """Tell the user one thing."""

    def close(self) -> None:
        """End the display."""


class RateMeter:
    """Rows per second over the last ``RATE_WINDOW_S`` seconds in which rows came in."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def measure(self, now_s: float, num_done: int) -> float | None:
        """Add a sample; the rate since the oldest kept one, None before the first progress."""
        while len(self._samples) > 2 and self._samples[1][0] < now_s - RATE_WINDOW_S:
            self._samples.popleft()
        if len(self._samples) == 1 and self._samples[0][1] == num_done:
            self._samples.clear()  # nothing has come in yet: loading a model is not slowness
        self._samples.append((now_s, num_done))
        (first_s, first_done) = self._samples[0]
        if num_done <= first_done or now_s - first_s < MIN_RATE_TIME_S:
            return None
        return (num_done - first_done) / (now_s - first_s)


class Waiter:
    """Waits for one job; ``worker`` is given in the embedded mode, where this process answers for there being one."""

    def __init__(
        self, job: Job, queue: Queue, settings: Settings, reporter: Reporter, worker: LocalWorker | None
    ) -> None:
        self._job = job
        self._queue = queue
        self._settings = settings
        self._reporter = reporter
        self._worker = worker
        self._meter = RateMeter()
        self._start_s = time.monotonic()
        self._next_reconcile_s = self._start_s
        self._last_note = ""
        self._is_broker_lost = False
        self._num_committed = len(job.committed())

    def run(self) -> JobState:
        """Block until the job has ended or is paused; always stops the worker it started.

        Raises EngineError when the worker keeps dying (the job has failed then), and what reading its files raises.
        """
        try:
            while True:
                committed = self._job.committed()
                if len(committed) == len(self._job.chunks) == self._num_committed:  # a worker tries it first
                    try_finish(self._job)
                self._reporter.update(self._take_snapshot(len(committed)))
                self._credit_worker(len(committed))
                if (state := self._job.state()) in ENDED:
                    return state
                self._tend()
                time.sleep(POLL_S)
        except EngineError as error:
            self._job.fail(str(error).splitlines()[0])
            raise
        finally:
            self._reporter.close()
            if self._worker is not None:
                self._worker.stop()

    def _tend(self) -> None:
        """See to it that the chunks are queued and that somebody serves the queue."""
        if self._worker is not None and self._worker.has_died:
            self._worker.restart()
            self._reporter.note(f"the worker died and was started again; its log: {self._worker.log_path}")
            self._next_reconcile_s = time.monotonic()
        now_s = time.monotonic()
        if now_s < self._next_reconcile_s:
            return
        self._next_reconcile_s = now_s + self._settings.worker.reconcile_interval_s
        try:
            self._queue.reconcile(self._job)
            self._find_worker()
            self._is_broker_lost = False
        except BrokerError as error:
            self._handle_broker_loss(error)

    def _find_worker(self) -> None:
        if self._worker is not None and self._worker.is_running():
            return
        if self._queue.workers_serving(self._job.spec.model.queue):
            self._say("")
        elif self._worker is not None:
            self._worker.start()
            self._reporter.note(f"started a worker for {self._job.spec.model.name}; its log: {self._worker.log_path}")
        else:
            command = worker_command(self._settings, self._job.spec.model)
            self._say(f"nobody serves queue {self._job.spec.model.queue}: start a worker with\n  {command}")

    def _credit_worker(self, num_committed: int) -> None:
        if self._worker is not None and num_committed > self._num_committed:
            self._worker.note_progress()
        self._num_committed = num_committed

    def _read_hints(self) -> Progress:
        try:
            self._queue.check()  # read_progress would answer "none", and complain in the log at each poll
        except BrokerError as error:
            self._handle_broker_loss(error)
            return Progress()
        return self._queue.read_progress(self._job)

    def _handle_broker_loss(self, error: BrokerError) -> None:
        """Start the embedded broker again; wait for one that is not ours."""
        if self._worker is not None:
            ensure_broker(self._settings)
            self._next_reconcile_s = time.monotonic()
            self._reporter.note("the embedded broker was gone and was started again")
        elif not self._is_broker_lost:
            self._reporter.note(f"{error}; the job's files are intact, waiting for the broker")
        self._is_broker_lost = True

    def _say(self, text: str) -> None:
        """Note ``text`` unless it was the last thing said."""
        if text and text != self._last_note:
            self._reporter.note(text)
        self._last_note = text

    def _take_snapshot(self, num_committed: int) -> Snapshot:
        counts = dict(self._job.counts())
        running = self._read_hints()
        for status, number in running.counts.items():
            counts[status] = counts.get(status, 0) + number
        snapshot = make_snapshot(self._job, num_committed, counts, time.monotonic() - self._start_s)
        rate = self._meter.measure(snapshot.elapsed_s, snapshot.num_done)
        eta_s = (snapshot.num_rows - snapshot.num_done) / rate if rate else None
        return replace(snapshot, num_running=running.num_chunks, rows_per_s=rate, eta_s=eta_s)


def make_snapshot(job: Job, num_committed: int, counts: Mapping[RowStatus, int], elapsed_s: float = 0.0) -> Snapshot:
    """A snapshot without a rate."""
    return Snapshot(job.job_id, job.num_rows, len(job.chunks), num_committed, counts, elapsed_s)
