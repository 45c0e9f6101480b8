"""One rank of an engine, ``python -m engine.rank FD``: it serves the pipe FD that it inherited until Stop or EOF.

EOF means that the worker is gone: the process ends at once, even in the middle of a step. Signals of a terminal or a
process manager are the worker's business and are ignored here. Knows neither models nor scheduling (engine.loop does).
"""

import contextlib
import ctypes
import dataclasses
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec
import structlog

from engine.frames import (
    PROTOCOL_VERSION,
    AddConstraint,
    Announce,
    Cancel,
    ClientFrame,
    Completions,
    Fatal,
    Heartbeat,
    Hello,
    RankFrame,
    Start,
    Stop,
    Submit,
    decode_client_frame,
)
from engine.pipe import FrameBuffer, pack
from engine.stats import EngineStats
from schemas import errors
from schemas.errors import EngineError, NightmillError, SettingsError
from schemas.log import configure_logging
from schemas.records import Completion, Constraint, ModelRef, Request
from schemas.settings import EngineSettings, LogSettings, Settings

if TYPE_CHECKING:
    from kernels.api import Choice  # imports torch

HEARTBEAT_INTERVAL_S = 1.0
RECEIVE_BYTES = 2**20
SWITCH_INTERVAL_S = 0.0005  # a burst of frames must not hold up the loop for the interpreter's 5 ms at a time
PR_SET_PDEATHSIG = 1  # linux/prctl.h

log = structlog.get_logger(__name__)


class EngineLike(Protocol):
    """What the rank needs of an engine; engine.loop.Engine is the real one."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def credits(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...
    @property
    def choices(self) -> Sequence["Choice"]: ...
    @property
    def stats(self) -> EngineStats: ...
    def add_constraint(self, constraint: Constraint) -> None: ...
    def tokenize(self, request: Request) -> Any: ...
    def add(self, request: Request, prompt: Any = None) -> None: ...
    def cancel(self, request_ids: Iterable[str]) -> None: ...
    def hear(self, num_batches: int) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> list[Completion]: ...
    def beat(self) -> None: ...


MakeEngine = Callable[[ModelRef, EngineSettings, int, str], EngineLike]
"""Of rank and rendezvous."""

Inbox = queue.SimpleQueue["Received"]


@dataclass
class Reader:
    """What the reading thread shares with the loop: where frames go, and who tokenises prompts before they go there."""

    inbox: Inbox
    engine: EngineLike | None = None


@dataclass(frozen=True)
class Arrivals:
    """A Submit frame whose prompts are tokenised; None where that must be tried again."""

    requests: tuple[Request, ...]
    prompts: tuple[Any, ...]


Received = ClientFrame | Arrivals | EngineError


def main(fd: int, make_engine: MakeEngine | None = None) -> NoReturn:
    """Serve the pipe ``fd``; ``make_engine`` replaces the real engine in tests. Never returns: the process ends."""
    _detach_from_terminal()
    _configure_logging()
    os.set_inheritable(fd, False)  # a compiler that the engine starts must not hold the pipe open
    sock = socket.socket(fileno=fd)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    inbox: Inbox = queue.SimpleQueue()
    reader = Reader(inbox)
    threading.Thread(target=_read, args=(sock, reader), name="rank-reader", daemon=True).start()

    def send(frame: RankFrame) -> None:
        sock.sendall(pack(frame))

    try:
        _serve(_load(reader, send, make_engine or _make_engine), inbox, send)
    except ConnectionError:
        pass  # the worker is gone
    except Exception as error:  # one of the three boundaries: the client reports the cause
        if not isinstance(error, NightmillError):  # ours say all in their message, which the client logs
            log.exception("rank_failed")
        with contextlib.suppress(ConnectionError):
            send(_fatal(error))
    _exit(1)


def _load(reader: Reader, send: Callable[[RankFrame], None], make_engine: MakeEngine) -> EngineLike:
    start = _checked(reader.inbox.get())
    if not isinstance(start, Start):
        raise EngineError(f"the first frame must be Start, not {type(start).__name__}")
    if start.protocol_version != PROTOCOL_VERSION:
        raise EngineError(
            f"the worker speaks protocol {start.protocol_version}, this engine {PROTOCOL_VERSION}: "
            "restart the worker after an upgrade"
        )
    send(Heartbeat(phase="loading"))
    engine = make_engine(start.model, EngineSettings.model_validate(start.engine), start.rank, start.rendezvous)
    reader.engine = engine
    kernels = tuple((choice.operation, choice.backend, choice.reason) for choice in engine.choices)
    send(
        Hello(
            protocol_version=PROTOCOL_VERSION,
            pid=os.getpid(),
            credits=engine.credits,
            max_model_len=engine.max_model_len,
            device=engine.device,
            kernels=kernels,
            gpus=engine.gpus,
        )
    )
    return engine


def _serve(engine: EngineLike, inbox: Inbox, send: Callable[[RankFrame], None]) -> NoReturn:
    """The loop: frames in, one step, completions out; heartbeats come from here, so that a hung step stops them."""
    pulse = Pulse(engine, send)
    pulse.beat_if_due()
    while True:
        for frame in _take(inbox, 0.0 if engine.has_work() else HEARTBEAT_INTERVAL_S):
            _apply(engine, frame)
        pulse.beat_if_due()
        completions = engine.step() if engine.has_work() else []
        pulse.beat_if_due()  # before the completions: who has the last of them has the counts of their last step too
        if completions:
            send(Completions(completions=tuple(completions)))


class Pulse:
    """When to send a heartbeat: once in a while, and whenever work begins or ends. Owned by the loop."""

    def __init__(self, engine: EngineLike, send: Callable[[RankFrame], None]) -> None:
        self._engine = engine
        self._send = send
        self._was_busy = False
        self._next_at = 0.0

    def beat_if_due(self) -> None:
        """Send one, if it is time."""
        is_busy = self._engine.has_work()
        if is_busy == self._was_busy and time.monotonic() < self._next_at:
            return
        self._engine.beat()
        self._was_busy, self._next_at = is_busy, time.monotonic() + HEARTBEAT_INTERVAL_S
        self._send(_heartbeat(self._engine, is_busy=is_busy))


def _take(inbox: Inbox, wait_s: float) -> list[ClientFrame | Arrivals]:
    """All frames that are there, after waiting at most ``wait_s`` for the first."""
    frames = []
    try:
        frames.append(_checked(inbox.get(timeout=wait_s) if wait_s else inbox.get_nowait()))
        while True:
            frames.append(_checked(inbox.get_nowait()))
    except queue.Empty:
        return frames


def _checked(received: Received) -> ClientFrame | Arrivals:
    if isinstance(received, EngineError):
        raise received
    return received


def _apply(engine: EngineLike, frame: ClientFrame | Arrivals) -> None:
    match frame:
        case Arrivals(requests=requests, prompts=prompts):
            for request, prompt in zip(requests, prompts, strict=True):
                engine.add(request, prompt)
        case AddConstraint(constraint=constraint):
            engine.add_constraint(constraint)
        case Announce(num_batches=num_batches):
            engine.hear(num_batches)
        case Cancel(request_ids=request_ids):
            engine.cancel(request_ids)
        case _:
            raise EngineError(f"unexpected {type(frame).__name__} frame after Hello")


def _heartbeat(engine: EngineLike, *, is_busy: bool) -> Heartbeat:
    values = dataclasses.asdict(engine.stats)
    if not is_busy:  # these gauges are as the last step found them
        values |= {"num_running": 0, "num_waiting": 0}
    return Heartbeat(phase="running" if is_busy else "idle", **values)


def _fatal(error: Exception) -> Fatal:
    """Name the error by its class in schemas.errors; a foreign one is an EngineError that quotes its class."""
    kind = type(error).__name__
    if type(error) is getattr(errors, kind, None):
        return Fatal(kind=kind, message=str(error))
    return Fatal(kind="EngineError", message=f"{kind}: {error}")


def _read(sock: socket.socket, reader: Reader) -> None:
    """Move frames to the inbox; end the process at EOF or Stop, whatever the main thread is doing."""
    buffer = FrameBuffer()
    try:
        while data := _receive(sock):
            for body in buffer.feed(data):
                frame = decode_client_frame(body)
                if isinstance(frame, Stop):
                    _exit(0)
                if isinstance(frame, Submit) and reader.engine:
                    reader.inbox.put(_tokenize(reader.engine, frame.requests))
                else:
                    reader.inbox.put(frame)
    except (EngineError, msgspec.MsgspecError) as error:
        reader.inbox.put(EngineError(f"unreadable frame from the worker (protocol {PROTOCOL_VERSION}): {error}"))
        while _receive(sock):  # what follows a broken frame means nothing
            pass
    _exit(1)


def _tokenize(engine: EngineLike, requests: tuple[Request, ...]) -> Arrivals:
    """Tokenise while the loop's thread plans and launches: the tokenizer is native and runs beside it."""
    prompts: list[Any] = []
    for request in requests:
        try:
            prompts.append(engine.tokenize(request))
        except Exception:  # noqa: BLE001 - it comes again in the loop's thread, which reports it
            prompts.append(None)
    return Arrivals(requests, tuple(prompts))


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(RECEIVE_BYTES)
    except ConnectionError:
        return b""


def _detach_from_terminal() -> None:
    """Leave SIGINT and SIGTERM to the worker; die with the thread that spawned us should the reader be starved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _configure_logging() -> None:
    try:
        settings = Settings.load().log
    except SettingsError:  # the entry points refuse bad settings; a program that uses LLM may not care for them
        settings = LogSettings()
    configure_logging(settings.level, settings.format)


def _make_engine(model: ModelRef, settings: EngineSettings, rank: int, rendezvous: str) -> EngineLike:
    from engine.follower import Follower
    from engine.loop import Engine  # torch comes in here, after the first heartbeat
    from engine.parts import load_parts

    parts = load_parts(model, settings, rank, rendezvous)
    return (Engine if parts.ranks.is_leader else Follower)(model, settings, parts)


def _exit(status: int) -> NoReturn:
    """End without unwinding: a step may be running, and nothing that it holds may keep the process."""
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
