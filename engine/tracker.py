"""Which requests are unresolved and which of them may be sent now. Knows no threads, no processes and no pipe.

What was in flight when the engine died is suspect: it shares the engine with fewer others, so that the request that
kills it is found in three deaths (all together, then groups, then each alone) and its neighbours survive.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from engine.balancer import Balancer, Load
from engine.frames import Cancel
from engine.pipe import pack
from schemas.records import Completion, FinishReason

MAX_REQUEST_DEATHS = 2  # a request in flight at more deaths is given up


@dataclass
class Tracked:
    """An unresolved request; owned by its tracker."""

    order: int  # of submission; also its id on the pipe, since callers' ids need not be unique
    request_id: str
    frame: bytes
    load: Load
    constraint_key: str | None = None
    constraint_frame: bytes = b""
    future: Future[Completion] = field(default_factory=Future)
    num_deaths: int = 0
    is_cancelled: bool = False
    replica: int = 0  # that has it, while it is in flight ...
    tokens: float = 0.0  # ... and what the balancer counts it as


Resolved = list[tuple[Future[Completion], Completion]]
"""Futures with what they are to be set to, by the caller, once it holds no lock: callbacks may do anything."""


class Sent:
    """What one replica has been sent and has not completed, and what it is to be told."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.cancels: list[str] = []
        self._keys: Counter[str] = Counter()

    def add(self, tracked: Tracked) -> bool:
        """Count a request; whether its constraint must go along."""
        self.num_requests += 1
        key = tracked.constraint_key
        if not key:
            return False
        self._keys[key] += 1
        return self._keys[key] == 1

    def remove(self, tracked: Tracked) -> None:
        """Forget a request."""
        self.num_requests -= 1
        if tracked.constraint_key:
            self._keys[tracked.constraint_key] -= 1
            if not self._keys[tracked.constraint_key]:
                del self._keys[tracked.constraint_key]

    def take_cancels(self) -> list[bytes]:
        """The packed cancels, once."""
        cancels, self.cancels = self.cancels, []
        return [pack(Cancel(request_ids=tuple(cancels)))] if cancels else []


class Tracker:
    """The tables of one client, which owns it and locks around every call."""

    def __init__(self, num_replicas: int = 1) -> None:
        self._tracked: dict[int, Tracked] = {}
        self._waiting: deque[Tracked] = deque()  # most deaths first, then in order of submission
        self._in_flight: dict[int, Tracked] = {}
        self._replicas = [Sent() for _ in range(num_replicas)]
        self._balancer = Balancer(num_replicas)

    def __len__(self) -> int:
        return len(self._tracked)

    @property
    def num_in_flight(self) -> int:
        """Requests that the engine has been sent and has not completed."""
        return len(self._in_flight)

    def add(self, tracked: Tracked) -> None:
        """Queue a request."""
        self._tracked[tracked.order] = tracked
        self._waiting.append(tracked)

    def admit(self, num_credits: int) -> list[bytes]:
        """Take what may be sent now, to each replica: packed cancels, constraints and requests.

        ``num_credits`` is what each replica gives. A constraint goes along unless a request in flight there has it: an
        engine may forget those of finished requests.
        """
        frames: list[list[bytes]] = [sent.take_cancels() for sent in self._replicas]
        while self._waiting and self._may_join(self._waiting[0], num_credits):
            tracked = self._waiting.popleft()
            open_ones = [index for index, sent in enumerate(self._replicas) if sent.num_requests < num_credits]
            replica = tracked.replica = self._balancer.choose(tracked.load, open_ones)
            tracked.tokens = self._balancer.add(tracked.load, replica)
            self._in_flight[tracked.order] = tracked
            if self._replicas[replica].add(tracked):
                frames[replica].append(tracked.constraint_frame)
            frames[replica].append(tracked.frame)
        return [b"".join(each) for each in frames]

    def finish(self, completions: Iterable[Completion]) -> Resolved:
        """Take out what the engine has completed; a completion of nothing in flight is ignored."""
        resolved = []
        for completion in completions:
            tracked = self._in_flight.pop(int(completion.request_id), None)
            if tracked is None:
                continue
            self._replicas[tracked.replica].remove(tracked)
            self._balancer.remove(tracked.tokens, tracked.replica, len(completion.token_ids))
            resolved.append(self._resolve(tracked, completion))
        return resolved

    def cancel(self, request_ids: Iterable[str]) -> Resolved:
        """Take out what waits; what is in flight ends by the engine's word, or at its death."""
        wanted = set(request_ids)
        for tracked in self._tracked.values():
            if tracked.request_id in wanted and not tracked.is_cancelled:
                tracked.is_cancelled = True
                if tracked.order in self._in_flight:
                    self._replicas[tracked.replica].cancels.append(str(tracked.order))
        return self._drop_cancelled()

    def requeue(self, cause: str) -> Resolved:
        """The engine died: queue again what was in flight, suspects first; give up what was there too often."""
        given_up = []
        for tracked in self._in_flight.values():
            tracked.num_deaths += 1
            if tracked.num_deaths > MAX_REQUEST_DEATHS:
                text = f"the engine died {tracked.num_deaths} times with this request in flight, last: {cause}"
                given_up.append(self._resolve(tracked, error_completion(tracked.request_id, text)))
        self._in_flight.clear()
        self._replicas = [Sent() for _ in self._replicas]
        self._balancer.clear()
        self._waiting = deque(sorted(self._tracked.values(), key=lambda tracked: (-tracked.num_deaths, tracked.order)))
        return given_up + self._drop_cancelled()

    def clear(self) -> list[Future[Completion]]:
        """Forget everything; the futures that nothing will resolve now."""
        futures = [tracked.future for tracked in self._tracked.values()]
        for table in (self._tracked, self._waiting, self._in_flight):
            table.clear()
        return futures

    def _may_join(self, tracked: Tracked, num_credits: int) -> bool:
        if not self._in_flight:
            return True
        company = next(iter(self._in_flight.values())).num_deaths
        num_together = (num_credits * len(self._replicas), math.isqrt(num_credits), 1)[tracked.num_deaths]
        return company == tracked.num_deaths and len(self._in_flight) < num_together

    def _drop_cancelled(self) -> Resolved:
        dropped = [tracked for tracked in self._waiting if tracked.is_cancelled]
        if dropped:
            self._waiting = deque(tracked for tracked in self._waiting if not tracked.is_cancelled)
        return [
            self._resolve(tracked, Completion(request_id=tracked.request_id, finish_reason=FinishReason.CANCELLED))
            for tracked in dropped
        ]

    def _resolve(self, tracked: Tracked, completion: Completion) -> tuple[Future[Completion], Completion]:
        del self._tracked[tracked.order]
        return tracked.future, msgspec.structs.replace(completion, request_id=tracked.request_id)


def error_completion(request_id: str, text: str) -> Completion:
    """The completion of a request that the engine could not serve."""
    return Completion(request_id=request_id, finish_reason=FinishReason.ERROR, error=text)
