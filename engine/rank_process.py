"""The client's end of one rank: spawn it, exchange frames with it, end it. Knows nothing of requests."""

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
        """Queue packed frames; ``handle`` writes them."""
        self._outgoing += data

    @property
    def exit_status(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.poll()

    def fileno(self) -> int:
        """Of this end of the pipe."""
        return self._sock.fileno()

    @property
    def awaited_events(self) -> int:
        """What to poll the pipe for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def handle(self, events: int) -> list[RankFrame] | None:
        """Write what is queued and read frames, as far as ``events`` of the pipe say that it goes.

        None means that the process is gone. Raises EngineError or msgspec.DecodeError for what is no frame.
        """
        if events & select.POLLOUT:
            self._write()
        return self._read() if events & ~select.POLLOUT else []

    def ask_to_stop(self, grace_s: float) -> None:
        """Send Stop behind what is queued; ``wait`` for the end then."""
        self._sock.settimeout(grace_s)
        frame: ClientFrame = Stop()
        with suppress(OSError):
            self._sock.sendall(self._outgoing + pack(frame))

    def wait(self, limit_s: float) -> int | None:
        """Exit status, or None if the process has not ended after ``limit_s``."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(max(0.0, limit_s))
        return None

    def kill(self) -> int | None:
        """Kill the process and its children; its exit status."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._sock.close()
        if (status := self.wait(KILL_WAIT_S)) is None:
            log.error("engine_unkillable", pid=self.pid, wait_s=KILL_WAIT_S)
        return status

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
