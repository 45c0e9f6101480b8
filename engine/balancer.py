"""Which replica gets a request: the one that would be done with it first, counting tokens in flight and known prefixes.

Lengths are estimates, for only the engine has a tokenizer. Knows no processes and no pipe.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.records import Request

BYTES_PER_TOKEN = 4
MIN_PREFIX_BYTES = 256
MAX_PREFIXES = 4096
"""Kept for each replica, the last seen; its cache forgets too."""

FIRST_OUTPUT_TOKENS = 64.0
OUTPUT_MEMORY = 0.99  # of the running mean of output lengths, for each request


@dataclass(frozen=True)
class Load:
    """What a request brings, nothing where one replica takes all; prefixes are (bytes, hash), the shortest first."""

    num_bytes: int = 0
    max_tokens: int = 0
    is_exact: bool = True  # nothing ends the output before ``max_tokens``
    prefixes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, request: Request) -> Load:
        """Measure a request; prefixes have sizes of powers of two."""
        if request.token_ids is not None:
            content = array("q", request.token_ids).tobytes()
            num_bytes = BYTES_PER_TOKEN * len(request.token_ids)
        else:
            messages = request.messages or ()
            text = request.text or "".join(f"{message.role}\0{message.content}\0" for message in messages)
            content = text.encode()
            num_bytes = len(content)
        sizes = [MIN_PREFIX_BYTES << power for power in range(max(0, len(content) // MIN_PREFIX_BYTES).bit_length())]
        prefixes = tuple((size * num_bytes // len(content), hash(content[:size])) for size in sizes)
        sampling = request.sampling
        is_exact = sampling.ignore_eos and not sampling.stop and not request.constraint_key
        return cls(num_bytes, sampling.budget, is_exact, prefixes)


class Balancer:
    """What the replicas of one engine have to do. Owned by the client's tracker."""

    def __init__(self, num_replicas: int) -> None:
        self._tokens = [0.0] * num_replicas
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._mean_output = FIRST_OUTPUT_TOKENS

    def choose(self, load: Load, replicas: Iterable[int]) -> int:
        """The one of ``replicas`` whose tokens, those that it would still have to compute included, are fewest."""
        return min(replicas, key=lambda replica: (self._tokens[replica] - self._num_known(load, replica), replica))

    def add(self, load: Load, replica: int) -> float:
        """Give a request to a replica; returns its tokens, for ``remove``."""
        tokens = (load.num_bytes / BYTES_PER_TOKEN) - self._num_known(load, replica)
        tokens += load.max_tokens if load.is_exact else min(load.max_tokens, self._mean_output)
        self._tokens[replica] += tokens
        seen = self._seen[replica]
        for _, prefix in load.prefixes:
            seen[prefix] = None
            seen.move_to_end(prefix)
        while len(seen) > MAX_PREFIXES:
            seen.popitem(last=False)
        return tokens

    def remove(self, tokens: float, replica: int, num_output: int) -> None:
        """A request is done after ``num_output`` tokens."""
        self._tokens[replica] -= tokens
        self._mean_output += (1 - OUTPUT_MEMORY) * (num_output - self._mean_output)

    def clear(self) -> None:
        """All replicas are new."""
        self._tokens = [0.0] * len(self._tokens)
        for seen in self._seen:
            seen.clear()

    def _num_known(self, load: Load, replica: int) -> float:
        """Tokens of the longest prefix that the replica has computed."""
        for size, prefix in reversed(load.prefixes):
            if prefix in self._seen[replica]:
                return size / BYTES_PER_TOKEN
        return 0.0
