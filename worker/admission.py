"""Who may run beside whom: chunks run side by side, a suspect runs alone, so that a worker's death names one chunk.

Without it the neighbours of a chunk that kills its workers are parked with it. Knows no chunks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schemas.errors import Interrupted

POLL_S = 0.25


class Admission:
    """A shared and an exclusive mode; those who wait for the exclusive one go first. Owned by the pool."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_running = 0
        self._num_waiting_alone = 0
        self._is_alone = False

    @contextmanager
    def enter(self, *, alone: bool, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Wait for the turn and run the block in it. Raises Interrupted if ``is_cancelled`` turns true meanwhile."""
        with self._changed:
            self._num_waiting_alone += alone
            try:
                while not self._may_enter(alone):
                    if is_cancelled():
                        raise Interrupted("stopped while waiting for other chunks")
                    self._changed.wait(POLL_S)
            finally:
                self._num_waiting_alone -= alone
            self._num_running += 1
            self._is_alone = alone
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._is_alone = False
                self._changed.notify_all()

    def _may_enter(self, alone: bool) -> bool:
        if alone:
            return self._num_running == 0
        return not self._is_alone and not self._num_waiting_alone
