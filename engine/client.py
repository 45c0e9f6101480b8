"""The worker's end of the engine: submit requests, get futures. Imports no torch and knows no Celery.

One permanent thread, the supervisor, owns the engine's processes: it spawns them, moves frames, notices a death or a
hang, restarts all and sends again what was in flight. Everything else only touches the request tables under one lock.
"""

import contextlib
import functools
import itertools
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog

from engine.balancer import Load
from engine.frames import (
    PROTOCOL_VERSION,
    AddConstraint,
    Announce,
    Completions,
    Fatal,
    Heartbeat,
    Hello,
    RankFrame,
    Start,
    Submit,
)
from engine.pipe import pack
from engine.rank_group import RankGroup
from engine.rank_process import RANK_COMMAND
from engine.topology import Topology
from engine.tracker import Resolved, Tracked, Tracker, error_completion
from schemas import errors
from schemas.errors import EngineDied, EngineError, KernelError, ModelError, NightmillError, SettingsError
from schemas.records import Completion, Constraint, FinishReason, ModelRef, Request
from schemas.settings import EngineSettings

DEATH_WINDOW_S = 600.0  # settings.engine.max_restarts counts deaths within it
MAX_LOAD_DEATHS = 2  # a signal may kill the first load once; what fails by itself fails again
MAX_BACKOFF_S = 30.0
STOP_GRACE_S = 5.0
POLL_INTERVAL_S = 1.0

T = TypeVar("T")

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Death:
    """Why an engine process ended; ``is_signal``: from outside or by a crash, so that another try may work."""

    error: NightmillError
    is_signal: bool = False


class EngineClient:
    """A resident engine process that survives its own death. Thread-safe.

    ``on_failed`` is called by the supervisor when the engine is given up after it had run; ``command`` is the rank's
    command line, to which the pipe's descriptor is appended.
    """

    def __init__(
        self,
        model: ModelRef,
        settings: EngineSettings,
        *,
        on_failed: Callable[[NightmillError], None] | None = None,
        command: Sequence[str] = RANK_COMMAND,
    ) -> None:
        self.pids: tuple[int, ...] = ()  # by rank, while the engine runs
        self.stats: Heartbeat | None = None  # of all replicas; counters start again at zero after a restart
        self.num_restarts = 0
        self.num_hangs = 0  # of these restarts, those after a silence
        self._model = model
        self._settings = settings
        self._topology = Topology.of(settings)
        self._on_failed = on_failed
        self._command = tuple(command)
        self._changed = threading.Condition()  # its lock guards all that follows
        self._supervisor: threading.Thread | None = None
        self._hello: Hello | None = None
        self._is_stopping = False
        self._failure: NightmillError | None = None  # set once, at the end
        self._orders = itertools.count()
        self._tracker = Tracker(self._topology.data)
        self._num_batches = 0  # announced, where replicas share experts
        self._hellos: dict[int, Hello] = {}  # by rank; of these processes, as the next
        self._heartbeats: dict[int, Heartbeat] = {}
        self._deaths: deque[float] = deque()  # supervisor only, as the next
        self._has_served = False  # since the last time that a request was found to be what kills the engine
        self._pack_constraint = functools.lru_cache(maxsize=64)(_pack_constraint)

    @property
    def hello(self) -> Hello:
        """What the engine said once it had loaded. Raises EngineError before."""
        if self._hello is None:
            raise EngineError("the engine has not been started")
        return self._hello

    @property
    def pid(self) -> int | None:
        """Process id of the first rank; None while none runs."""
        return self.pids[0] if self.pids else None

    @property
    def num_credits(self) -> int:
        """Requests that all replicas together may have in flight."""
        return self.hello.credits * self._topology.data

    def start(self) -> Hello:
        """Start the engine and block until it has loaded, or until another thread calls ``stop``.

        Raises the cause, within seconds of it: SettingsError, ModelError, KernelError, or EngineError (out of
        memory, no start in time).
        """
        with self._changed:
            if self._supervisor is None and self._failure is None:
                self._wake_reader, self._wake_writer = socket.socketpair()
                self._wake_writer.setblocking(False)
                self._supervisor = threading.Thread(target=self._supervise, name="engine-supervisor", daemon=True)
                self._supervisor.start()
            self._changed.wait_for(lambda: self._failure or self._hello)
            self._raise_failure()
            return self.hello

    def submit(self, request: Request, constraint: Constraint | None = None) -> Future[Completion]:
        """Queue a request; block while as many are unresolved as the engine gives credits for.

        ``constraint`` is the one that ``request.constraint_key`` names. The future resolves once, with a Completion in
        every case but the engine's end. Raises EngineError when the engine is not running any more.
        """
        if request.constraint_key != (constraint.key if constraint else None):
            raise ValueError(
                f"request {request.request_id!r} names constraint {request.constraint_key}: pass that constraint"
            )
        order = next(self._orders)
        own = msgspec.structs.replace(request, request_id=str(order))  # callers' ids need not be unique
        try:
            frame = pack(Submit(requests=(own,)))
            constraint_frame = self._pack_constraint(constraint) if constraint else b""
        except (EngineError, UnicodeEncodeError) as error:
            return _resolved(error_completion(request.request_id, f"request cannot be sent: {error}"))
        load = Load.of(request) if self._topology.data > 1 else Load()
        tracked = Tracked(order, request.request_id, frame, load, request.constraint_key, constraint_frame)
        tracked.future.set_running_or_notify_cancel()  # only ``cancel`` ends it early
        with self._changed:
            if self._supervisor is None:
                self._raise_failure()
                raise EngineError("start the engine before submitting requests")
            self._changed.wait_for(lambda: self._failure or (self._hello and len(self._tracker) < self.num_credits))
            self._raise_failure()
            self._tracker.add(tracked)
            self._wake()
        return tracked.future

    def settled_stats(self) -> Heartbeat | None:
        """Block until every request is resolved, and return what was counted until then; None if the engine failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._is_settled())
            return None if self._failure else self.stats

    def cancel(self, request_ids: Iterable[str]) -> None:
        """End these requests, where unresolved, with finish reason ``cancelled``; returns before they have ended."""
        self._settle(self._tracker.cancel, request_ids)
        with self._changed:
            self._wake()

    def stop(self) -> None:
        """End the engine; unresolved futures fail with EngineError. Safe to call twice and from any thread."""
        with self._changed:
            self._is_stopping = True
            supervisor = self._supervisor
            if supervisor is None and self._failure is None:
                self._failure = EngineError("the engine was stopped")
            self._wake()
            self._changed.notify_all()
        if supervisor and supervisor is not threading.current_thread():
            supervisor.join()

    def _supervise(self) -> None:
        failure: NightmillError = EngineError("the engine's supervisor failed: see the log")  # stands only after a bug
        try:
            failure = self._keep_running()
        finally:
            self._end(failure)

    def _keep_running(self) -> NightmillError:
        """Run ranks, one after the other, until there is a reason not to."""
        while True:
            death = self._run_ranks()
            if self._is_stopping:
                return EngineError("the engine was stopped")
            self._note_death(death)
            if failure := self._final_failure(death):
                return failure
            self._absolve(self._settle(self._tracker.requeue, str(death.error)))
            with self._changed:
                backoff_s = min(MAX_BACKOFF_S, 0.1 * 2 ** max(0, len(self._deaths) - 1))
                if self._changed.wait_for(lambda: self._is_stopping, backoff_s):
                    return EngineError("the engine was stopped")
            self.num_restarts += 1

    def _run_ranks(self) -> _Death:
        self._hellos.clear()
        self._heartbeats.clear()
        try:
            ranks = RankGroup(self._command, self._topology.num_ranks, self._start_frame)
        except OSError as error:
            return _Death(EngineError(f"cannot start {' '.join(self._command)}: {error}"))
        self.pids = ranks.pids
        death: _Death | None = None
        try:
            death = self._serve(ranks)
        except (EngineError, msgspec.MsgspecError) as error:
            death = _Death(EngineError(f"unreadable frame from the engine (protocol {PROTOCOL_VERSION}): {error}"))
        finally:
            status = ranks.end(STOP_GRACE_S if self._is_stopping and not death else 0.0)
            self.pids = ()
        is_echo = death and type(death.error) is EngineError and status is not None and status < 0
        return _death_by_status(status) if is_echo or not death else death  # the others cannot say what killed a rank

    def _start_frame(self, rank: int, rendezvous: str) -> bytes:
        engine = self._settings.model_dump(mode="json")
        return pack(
            Start(protocol_version=PROTOCOL_VERSION, model=self._model, engine=engine, rank=rank, rendezvous=rendezvous)
        )

    def _serve(self, ranks: RankGroup) -> _Death | None:
        """Move frames until a rank fails (its death), ends or is to be stopped (None)."""
        while not self._is_stopping:
            is_loaded = len(self._hellos) == self._topology.num_ranks
            if is_loaded:
                self._send(ranks)
            limit_at = self._limit_at(ranks, is_loaded)
            frames = ranks.exchange(self._wake_reader, min(POLL_INTERVAL_S, limit_at - time.monotonic()))
            if frames is None:
                return None
            for rank, frame in frames:
                if death := self._receive(rank, frame):
                    return death
            if not frames and time.monotonic() >= self._limit_at(ranks, is_loaded):
                return self._overdue(is_loaded)
        return None

    def _send(self, ranks: RankGroup) -> None:
        """Queue what may be sent now; ranks that share experts hear of it wherever it goes."""
        with self._changed:
            frames = self._tracker.admit(self.hello.credits)
        if self._topology.shares_experts and any(frames):
            self._num_batches += 1
            frames = [frame + pack(Announce(num_batches=self._num_batches)) for frame in frames]
        for rank, frame in zip(self._topology.leaders, frames, strict=True):
            ranks.put(rank, frame)

    def _limit_at(self, ranks: RankGroup, is_loaded: bool) -> float:
        """When to give the ranks up: loading has one limit in all, running ranks have one for each silence."""
        if is_loaded:
            return ranks.heard_at + self._settings.hang_timeout_s
        return ranks.started_at + self._settings.start_timeout_s

    def _overdue(self, is_loaded: bool) -> _Death:
        if is_loaded:
            self.num_hangs += 1
            return _Death(EngineDied(f"the engine hung: no heartbeat for {self._settings.hang_timeout_s:g} s"))
        return _Death(
            EngineError(
                f"the engine did not load within {self._settings.start_timeout_s:g} s: raise engine.start_timeout_s"
            )
        )

    def _receive(self, rank: int, frame: RankFrame) -> _Death | None:
        match frame:
            case Completions(completions=completions):
                self._has_served = True
                self._settle(self._tracker.finish, completions)
            case Heartbeat():
                if rank in self._topology.leaders:
                    self._heartbeats[rank] = frame
                    with self._changed:
                        self.stats = total(self._heartbeats.values())
                        self._changed.notify_all()
            case Hello(protocol_version=version) if version != PROTOCOL_VERSION:
                return _Death(EngineError(f"the engine speaks protocol {version}, this client {PROTOCOL_VERSION}"))
            case Hello():
                self._hellos[rank] = frame
                log.info("rank_started", rank=rank, pid=frame.pid, device=frame.device, credits=frame.credits)
                if len(self._hellos) == self._topology.num_ranks:
                    self._greet()
            case Fatal(kind=kind, message=message):
                return _Death(_error_class(kind)(message))
        return None

    def _greet(self) -> None:
        """All ranks have loaded: the engine is what its first rank says, on the GPUs of all."""
        hellos = [self._hellos[rank] for rank in range(self._topology.num_ranks)]
        with self._changed:
            self._hello = msgspec.structs.replace(hellos[0], gpus=tuple(gpu for hello in hellos for gpu in hello.gpus))
            self._changed.notify_all()

    def _settle(self, change: Callable[[T], Resolved], argument: T) -> Resolved:
        """Change the tables under the lock, then set the futures without it: their callbacks may call the client."""
        with self._changed:
            resolved = change(argument)
            self._changed.notify_all()
        for future, completion in resolved:
            future.set_result(completion)
        return resolved

    def _absolve(self, given_up: Resolved) -> None:
        """Forget the deaths once a request is found to blame; an engine that serves nobody is to blame itself."""
        if self._has_served and any(done.finish_reason is FinishReason.ERROR for _, done in given_up):
            self._has_served = False
            self._deaths.clear()

    def _note_death(self, death: _Death) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATH_WINDOW_S:
            self._deaths.popleft()
        log.error(
            "engine_died",
            reason=str(death.error),
            num_in_flight=self._tracker.num_in_flight,
            num_deaths=len(self._deaths),
        )

    def _final_failure(self, death: _Death) -> NightmillError | None:
        """Why the engine must not be started again, if so."""
        if self._hello is None and not (death.is_signal and len(self._deaths) < MAX_LOAD_DEATHS):
            return death.error
        if isinstance(death.error, SettingsError | ModelError | KernelError):
            return death.error
        if len(self._deaths) > self._settings.max_restarts:
            minutes = DEATH_WINDOW_S / 60
            return EngineError(f"the engine died {len(self._deaths)} times in {minutes:g} minutes, last: {death.error}")
        return None

    def _end(self, failure: NightmillError) -> None:
        """Fail everything that is unresolved and everybody who waits."""
        with self._changed:
            self._failure = failure
            self._wake_reader.close()
            self._wake_writer.close()
            futures = self._tracker.clear()
            self._changed.notify_all()
        for future in futures:
            future.set_exception(_copy(failure))
        if self._hello is not None and not self._is_stopping:
            log.error("engine_failed", reason=str(failure))
            if self._on_failed:
                self._on_failed(failure)

    def _is_settled(self) -> bool:
        """Replicas that wait for each other are busy a little longer than their requests."""
        return not len(self._tracker) and self.stats is not None and self.stats.phase == "idle"

    def _wake(self) -> None:
        """Make the supervisor look at the tables; the caller holds the lock."""
        if self._supervisor is not None and self._failure is None:
            with contextlib.suppress(BlockingIOError):  # then enough bytes wait already
                self._wake_writer.send(b"\0")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise _copy(self._failure)


def total(heartbeats: Iterable[Heartbeat]) -> Heartbeat:
    """One heartbeat for all replicas: what they count, added up."""
    each = list(heartbeats)
    counts = {
        name: sum(getattr(beat, name) for beat in each)
        for name in Heartbeat.__struct_fields__
        if name.startswith("num_") or name.endswith("_s")
    }
    phases = {beat.phase for beat in each}
    phase = next(phase for phase in ("loading", "running", "idle") if phase in phases)
    names = ("expert_balance", "expert_balance_unmoved")  # alike where ranks share experts
    balances = {name: max(getattr(beat, name) for beat in each) for name in names}
    return Heartbeat(
        phase=phase,
        drafts_by_position=_add_up(beat.drafts_by_position for beat in each),
        accepted_by_position=_add_up(beat.accepted_by_position for beat in each),
        **balances,
        **counts,
    )


def _add_up(counts: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(*counts, fillvalue=0)))


def _resolved(completion: Completion) -> Future[Completion]:
    future: Future[Completion] = Future()
    future.set_result(completion)
    return future


def _pack_constraint(constraint: Constraint) -> bytes:
    return pack(AddConstraint(constraint=constraint))


def _copy(error: NightmillError) -> NightmillError:
    """An equal exception, since each raise writes its traceback into the object."""
    return type(error)(*error.args)


def _error_class(kind: str) -> type[NightmillError]:
    found = getattr(errors, kind, None)
    return found if isinstance(found, type) and issubclass(found, NightmillError) else EngineError


def _death_by_status(status: int | None) -> _Death:
    if status is None or status >= 0:
        return _Death(EngineDied(f"the engine process ended with status {status}: its output is in the log"))
    name = signal.Signals(-status).name if -status in signal.valid_signals() else str(-status)
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return _Death(EngineDied(f"the engine process was killed by {name}{hint}"), is_signal=True)
