"""The one task: run a chunk from message to committed part. Decides what a failure means for the message.

Truth is the job's directory; Redis is asked for hints only. Knows no rows: jobs.results does.
"""

import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import structlog
from celery import shared_task
from celery.exceptions import Ignore, Reject
from celery.worker import state

from jobs.finish import finish_or_fail
from jobs.job import Job, write_failure
from jobs.ledger import keep_answers
from jobs.pace import PaceMeter
from jobs.queue import TASK_NAME
from jobs.report import ensure_report
from jobs.results import run_rows
from jobs.reuse import Known, read_known
from jobs.spill import open_spill
from jobs.thresholds import find_job_breach
from schemas.errors import (
    BrokerError,
    EngineError,
    InputDataError,
    Interrupted,
    JobError,
    JobNotFound,
    NotFound,
    StoreError,
)
from schemas.records import Chunk, Completion, Constraint, Request, RowResult, RowStatus
from worker.pool import Slot, current_slot

log = structlog.get_logger(__name__)

FLAG_INTERVAL_S = 2.0  # between looks at the job's cancel and pause files
PROGRESS_INTERVAL_S = 1.0
REST_S = 15.0
"""How long a slot rests after the store or the engine failed: no chunk's fault, and a full disk takes time to mend."""

TWINS_REST_S = 1.0
"""The same where a chunk waits for what earlier ones ask: other slots and workers are at it."""


class Postponed(Exception):
    """Rows of the chunk wait for another one; its own are kept."""


@shared_task(bind=True, name=TASK_NAME, acks_late=True, ignore_result=True)  # type: ignore[untyped-decorator]
def run_chunk(task: Any, job_id: str, index: int) -> None:
    """Run one chunk unless it is committed, cancelled, or in other hands; design.md section 5, hops 2 to 7.

    Returns when the message is done with; raises Reject when it must be delivered again.
    """
    slot = current_slot()
    with structlog.contextvars.bound_contextvars(job=job_id, chunk=index), task.app.tracer.chunk(job_id, index):
        try:
            _receive(task.app, slot, job_id, index)
        except Interrupted as error:
            if task.request.id in state.revoked:
                raise Ignore from error  # Celery has acknowledged it already
            log.info("chunk_given_back")
            task.app.metrics.count_chunk("given_back")
            raise Reject(str(error), requeue=True) from error
        except (StoreError, EngineError, OSError) as error:
            log.error("chunk_postponed", reason=str(error), rest_s=REST_S)
            task.app.metrics.count_chunk("postponed")
            slot.rest(REST_S)
            raise Reject(str(error), requeue=True) from error


def _receive(app: Any, slot: Slot, job_id: str, index: int) -> None:
    app.on_hop("received")
    try:
        job = app.jobs.find(job_id)
    except JobNotFound as error:
        log.error("job_gone", reason=str(error))
        return
    except JobError as error:
        log.error("job_unusable", reason=str(error))
        write_failure(app.store.within(job_id), f"the worker on {socket.gethostname()} cannot use the job: {error}")
        return
    if not job.is_committed(index):
        if job.is_stopped():
            log.info("chunk_dropped", reason="the job is cancelled, paused or aborted")
            app.metrics.count_chunk("dropped")
            return
        with app.job_queue.lease(job_id, index) as is_ours:
            if not is_ours:
                log.info("chunk_dropped", reason="another worker has its lease")
                app.metrics.count_chunk("lease_held")
                return
            app.on_hop("leased")
            if job.failure() is not None:
                job.unfail()  # here is an engine that runs
            if not ChunkRun(app, slot, job, job.chunks[index]).run():
                return
        if index == 0 and job.has_canary() and not job.is_stopped():
            _go_on(app, job)
    _finish(app, job)
    app.on_hop("finished")


def _go_on(app: Any, job: Job) -> None:
    """The canary was good enough: queue the other chunks. If that fails, waiting verbs and idle workers do it."""
    try:
        app.job_queue.reconcile(job)
    except BrokerError as error:
        log.warning("chunks_not_queued", reason=str(error))


def _finish(app: Any, job: Job) -> None:
    """Finish the job if this was its last chunk; a failure is not this chunk's."""
    try:
        if finish_or_fail(job):
            ensure_report(job, app.store, app.settings.jobs)
    except (StoreError, JobError, InputDataError) as error:
        log.error("finish_failed", reason=str(error))


class ChunkRun:
    """One attempt at a chunk under its lease; owned by the slot that runs it."""

    def __init__(self, app: Any, slot: Slot, job: Job, chunk: Chunk) -> None:
        self._app = app
        self._slot = slot
        self._job = job
        self._chunk = chunk
        self._token = delivery_token()
        self._spill = open_spill(job, chunk, app.settings.state_dir)
        self._job_stop = Throttled(FLAG_INTERVAL_S, job.is_stopped)
        self._next_progress_s = 0.0
        self._has_submitted = False
        self._pace = PaceMeter()
        self._num_known: Counter[RowStatus] = Counter()

    def run(self) -> bool:
        """Commit the chunk's part: True. False: the job was cancelled or paused meanwhile.

        Raises Interrupted when the worker must stop, Reject when the chunk failed and may be tried again, and
        StoreError, OSError or EngineError, which are not the chunk's fault and are not counted against it.
        """
        queue, job_id, index = self._app.job_queue, self._job.job_id, self._chunk.index
        is_suspect = queue.num_deliveries(job_id, index) > 0
        try:
            with self._slot.pool.admission.enter(alone=is_suspect, is_cancelled=self._is_cancelled):
                self._run_counted()
        except Postponed as error:
            log.info("chunk_postponed", reason=str(error), rest_s=TWINS_REST_S)
            self._slot.rest(TWINS_REST_S)
            raise Reject(str(error), requeue=True) from error
        except Interrupted:
            if self._slot.is_stopping:
                raise
            log.info("chunk_dropped", reason="the job was cancelled, paused or aborted")
            self._app.metrics.count_chunk("dropped")
            return False
        queue.forget_deliveries(job_id, index)
        return True

    def _run_counted(self) -> None:
        queue, job_id, index = self._app.job_queue, self._job.job_id, self._chunk.index
        num_deliveries = queue.count_delivery(job_id, index, self._token)
        try:
            self._run_or_park(num_deliveries)
        except Reject:
            raise
        except BaseException:
            queue.uncount_delivery(job_id, index, self._token)
            raise
        finally:
            queue.clear_progress(job_id, index)

    def _run_or_park(self, num_deliveries: int) -> None:
        """A chunk that keeps failing, or keeps killing its workers, is parked: its rows fail and the job goes on."""
        limit = self._app.settings.jobs.max_chunk_deliveries
        if num_deliveries > limit:
            self._park(f"its worker died {limit} times while running this chunk")
            return
        try:
            self._generate()
        except (Interrupted, Postponed, EngineError):
            raise
        except BaseException as error:  # SystemExit and MemoryError too: they would leave the slot's message unsettled
            if isinstance(error, (StoreError, OSError)) and not isinstance(error, NotFound):
                raise
            log.exception("chunk_failed", delivery=num_deliveries, limit=limit)
            self._app.metrics.count_chunk("failed")
            if num_deliveries < limit:
                raise Reject(repr(error), requeue=True) from error
            self._park(f"{type(error).__name__}: {error}")

    def _generate(self) -> None:
        started_s = time.time()
        with closing(self._spill):
            rows, known = self._run_rows()
        self._app.on_hop("validated")
        provenance = self._slot.pool.machine.describe_run(started_s, rows, self._pace.read())
        is_ours = self._commit(rows, known=known.table, provenance=provenance)
        seconds = round(time.time() - started_s, 3)
        if is_ours:
            statuses = Counter(row.status for row in rows) + Counter(known.statuses.values())
            self._app.metrics.count_part(statuses, seconds)
        log.info("chunk_done", rows=self._chunk.num_rows, computed=len(rows), seconds=seconds)

    def _run_rows(self) -> tuple[list[RowResult], Known]:
        """Ask for what nobody else does; rows that wait for an earlier chunk come last.

        Raises Postponed if they still wait when all others are done.
        """
        rows: list[RowResult] = []
        while True:
            known = read_known(self._job, self._chunk.index)
            self._num_known = Counter(known.statuses.values()) + Counter(row.status for row in rows)
            skip = known.statuses.keys() | known.waiting | {row.row_index for row in rows}
            if len(skip) == self._chunk.num_rows and known.waiting:
                self._spill.flush()
                raise Postponed(f"{len(known.waiting)} rows wait for the answers of earlier chunks")
            rows += run_rows(
                self._job,
                self._chunk,
                self._submit,
                is_cancelled=self._is_cancelled,
                on_progress=self._tell_progress,
                cancel=self._slot.pool.client.cancel,
                reader=self._app.reader,
                spill=self._spill,
                skip=skip,
            )
            if not known.waiting:
                return sorted(rows, key=lambda row: row.row_index), known

    def _park(self, cause: str) -> None:
        log.error("chunk_parked", reason=cause)
        self._app.metrics.count_chunk("parked")
        done, known = self._spill.read(), read_known(self._job, self._chunk.index)
        failed = failed_rows(self._chunk, f"the chunk was parked: {cause}")
        rows = [done.get(row.row_index, row) for row in failed if row.row_index not in known.statuses]
        history = self._app.job_queue.deliveries(self._job.job_id, self._chunk.index)
        if self._commit(rows, known=known.table, parked=True, history=history):
            self._app.metrics.count_rows(Counter(row.status for row in rows) + Counter(known.statuses.values()))

    def _commit(self, rows: list[RowResult], **how: Any) -> bool:
        """Commit the part; ``how`` as for Job.commit_part. False: another worker was first."""
        is_ours = self._job.commit_part(self._chunk.index, rows, **how)
        if not is_ours:
            log.info("chunk_was_committed", reason="another worker was first")
            self._app.metrics.count_chunk("overtaken")
        self._spill.remove()
        self._abort_beyond_thresholds()
        self._app.on_hop("committed")
        return is_ours

    def _submit(self, request: Request, constraint: Constraint | None) -> Future[Completion]:
        future: Future[Completion] = self._slot.pool.client.submit(request, constraint)
        future.add_done_callback(self._pace.note)
        if not self._has_submitted:
            self._has_submitted = True
            self._app.on_hop("submitted")
        return future

    def _is_cancelled(self) -> bool:
        return self._slot.is_stopping or self._job_stop()

    def _tell_progress(self, counts: Mapping[RowStatus, int]) -> None:
        if (now_s := time.monotonic()) >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_INTERVAL_S
            self._app.job_queue.progress(self._job.job_id, self._chunk.index, self._num_known + Counter(counts))
            self._abort_beyond_thresholds(counts)

    def _abort_beyond_thresholds(self, running: Mapping[RowStatus, int] | None = None) -> None:
        """Stop the job if too many of its rows fail; other workers see that as they see a cancel."""
        if not self._job.is_aborted() and (breach := find_job_breach(self._job, running)) is not None:
            log.error("job_aborted", reason=breach)
            self._job.fail(breach, is_abort=True)
            keep_answers(self._job)


class Throttled:
    """A flag that is looked at once per interval, and stays up."""

    def __init__(self, interval_s: float, look: Callable[[], bool]) -> None:
        self._interval_s = interval_s
        self._look = look
        self._next_s = 0.0
        self._is_up = False

    def __call__(self) -> bool:
        """Whether the flag was up at the last look."""
        if not self._is_up and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + self._interval_s
            self._is_up = self._look()
        return self._is_up


def delivery_token() -> str:
    """Names one try at a chunk: when and where it began, for the history of a chunk that is parked."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return f"{now} {socket.gethostname()} pid {os.getpid()} {uuid.uuid4().hex[:8]}"


def failed_rows(chunk: Chunk, cause: str) -> list[RowResult]:
    """A result for each row of a chunk that is given up."""
    indices = range(chunk.start_row, chunk.start_row + chunk.num_rows)
    return [RowResult(row_index=row_index, status=RowStatus.FAILED, error=cause) for row_index in indices]
