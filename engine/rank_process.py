"""The client's end of one engine process: spawn it, exchange frames with it, end it. Knows nothing of requests."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog

from engine.frames import ClientFrame, RankFrame, Stop, decode_rank_frame
from engine.pipe import FrameBuffer, pack

RANK_COMMAND = (sys.executable, "-m", "engine.rank")
RECEIVE_BYTES = 2**20
KILL_WAIT_S = 30.0  # a killed process may hang in its GPU driver: then it is left behind

log = structlog.get_logger(__name__)


class RankProcess:
    """Owned by one thread, which must outlive the process: Linux kills the child of a thread that ends.

    Not forked but executed, because CUDA does not survive a fork; in a session of its own, so that Ctrl-C reaches the
    worker only and the whole group can be killed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start ``command`` with the pipe's descriptor as its last argument. Raises OSError."""
        self._sock, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a library prints belongs in the log
                start_new_session=True,
            )
        except BaseException:
            self._sock.close()
            raise
        finally:
            theirs.close()
        self._sock.setblocking(False)
        self._incoming = FrameBuffer()
        self._outgoing = bytearray()
        self.started_at = time.monotonic()
        self.heard_at = self.started_at

    @property
    def pid(self) -> int:
        """Process id; the process group has the same number."""
        return self._process.pid

    def put(self, data: bytes) -> None:
        """Queue packed frames; ``exchange`` writes them."""
        self._outgoing += data

    def exchange(self, wakeup: socket.socket, timeout_s: float) -> list[RankFrame] | None:
        """Write what is queued and read frames, until something happens on the pipe or on ``wakeup``.

        None means that the process is gone. Raises EngineError or msgspec.DecodeError for what is no frame.
        """
        was_alive = self._process.poll() is None
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.register(wakeup, select.POLLIN)
        events = dict(poll.poll(max(0.0, timeout_s) * 1000))
        if wakeup.fileno() in events:
            wakeup.recv(RECEIVE_BYTES)
        happened = events.get(self._sock.fileno(), 0)
        if happened & select.POLLOUT:
            self._write()
        if happened & ~select.POLLOUT:
            return self._read()
        return [] if was_alive or events else None

    def end(self, grace_s: float = 0.0) -> int | None:
        """Kill the process and its children, after asking it to stop where there is ``grace_s``; its exit status."""
        if grace_s > 0:
            self._ask_to_stop(grace_s)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._sock.close()
        try:
            return self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            log.error("engine_unkillable", pid=self.pid, wait_s=KILL_WAIT_S)
            return None

    def _write(self) -> None:
        try:
            num_sent = self._sock.send(self._outgoing)
        except BlockingIOError:
            return
        except ConnectionError:  # the next read says what became of it
            num_sent = len(self._outgoing)
        del self._outgoing[:num_sent]

    def _read(self) -> list[RankFrame] | None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            return None
        if not data:
            return None
        self.heard_at = time.monotonic()
        return [decode_rank_frame(body) for body in self._incoming.feed(data)]

    def _ask_to_stop(self, grace_s: float) -> None:
        self._sock.settimeout(grace_s)
        frame: ClientFrame = Stop()
        with suppress(OSError, subprocess.TimeoutExpired):
            self._sock.sendall(self._outgoing + pack(frame))
            self._process.wait(grace_s)
