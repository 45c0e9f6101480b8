"""The ranks of one engine as the client sees them: started together, and gone as soon as one of them is.

Knows which rank a frame is from, and nothing of requests.
"""

import select
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.frames import RankFrame
from engine.rank_process import RECEIVE_BYTES, RankProcess


class RankGroup:
    """Owned by one thread, as its processes are."""

    def __init__(self, command: Sequence[str], num_ranks: int, start_frame: Callable[[int, str], bytes]) -> None:
        """Start the ranks; ``start_frame`` makes the first frame of a rank and the file to meet at. Raises OSError."""
        self._directory = tempfile.TemporaryDirectory(prefix="nightmill-ranks-")
        self._ranks: list[RankProcess] = []
        self._gone: set[int] = set()
        try:
            for index in range(num_ranks):
                self._ranks.append(RankProcess(command))
                self._ranks[-1].put(start_frame(index, str(Path(self._directory.name) / "rendezvous")))
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids, by rank."""
        return tuple(rank.pid for rank in self._ranks)

    @property
    def started_at(self) -> float:
        """When the last rank was started, in monotonic seconds."""
        return self._ranks[-1].started_at

    @property
    def heard_at(self) -> float:
        """When the rank that has been silent for longest was last heard, in monotonic seconds."""
        return min(rank.heard_at for rank in self._ranks)

    def put(self, rank: int, data: bytes) -> None:
        """Queue packed frames; ``exchange`` writes them."""
        self._ranks[rank].put(data)

    def exchange(self, wakeup: socket.socket, timeout_s: float) -> list[tuple[int, RankFrame]] | None:
        """Write what is queued and read frames, until something happens on a pipe or on ``wakeup``.

        None means that a rank is gone. Raises EngineError or msgspec.DecodeError for what is no frame.
        """
        has_ended = any(rank.exit_status is not None for rank in self._ranks)
        poll = select.poll()
        for rank in self._ranks:
            poll.register(rank, rank.awaited_events)
        poll.register(wakeup, select.POLLIN)
        events = dict(poll.poll(max(0.0, timeout_s) * 1000))
        if wakeup.fileno() in events:
            wakeup.recv(RECEIVE_BYTES)
        received: list[tuple[int, RankFrame]] = []
        for index, rank in enumerate(self._ranks):
            frames = rank.handle(events.get(rank.fileno(), 0))
            if frames is None:
                self._gone.add(index)
            received += [(index, frame) for frame in frames or []]
        return received if received or not (self._gone or (has_ended and not events)) else None

    def end(self, grace_s: float = 0.0) -> int | None:
        """Kill all ranks, after asking them to stop where there is ``grace_s``.

        Returns the exit status of a rank that was not killed here: a signal's, if there is one.
        """
        if grace_s > 0:
            stop_at = time.monotonic() + grace_s
            for rank in self._ranks:
                rank.ask_to_stop(grace_s)
            for rank in self._ranks:
                rank.wait(stop_at - time.monotonic())
        own = [index in self._gone or rank.exit_status is not None for index, rank in enumerate(self._ranks)]
        statuses = [rank.kill() for rank in self._ranks]
        self._directory.cleanup()
        return min(
            (status for status, is_own in zip(statuses, own, strict=True) if is_own and status is not None),
            default=None,
        )
