"""The tokens that grammars are matched with, as bytes, and sets of them as bits. Knows no grammar engine."""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence as Seq
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.int32]]
"""One bit a token, as in a mask."""

SHAPES_KEPT = 256
"""Sets of characters that grammars tell apart, most recently used; the tokens that came there are kept with each."""


class Shapes(dict[int, int]):
    """The shape of a token, by its number: a number below 0; a token that is like no other has its own.

    Tokens of one shape write as many characters, each between the same two of some ascending code points.
    """

    def __init__(self, tokens: Seq[bytes], edges: Seq[int]) -> None:
        super().__init__()
        self._tokens, self._edges = tokens, edges
        self._known: dict[tuple[int, ...], int] = {}

    def __missing__(self, token_id: int) -> int:
        try:
            text = self._tokens[token_id].decode() if token_id < len(self._tokens) else ""
        except UnicodeDecodeError:
            text = ""
        kinds = tuple(bisect_right(self._edges, ord(char)) for char in text)
        shape = self[token_id] = self._known.setdefault(kinds, ~len(self._known)) if kinds else token_id
        return shape


NO_SHAPES = Shapes((), ())


class Vocabulary:
    """Tokens by number, and sorted, to find those that begin with another one."""

    def __init__(self, tokens: Seq[bytes], end_ids: Seq[int] = ()) -> None:
        self.tokens = tokens
        self.end_ids = end_ids
        self.num_words = -(-len(tokens) // 32)
        self._sorted = sorted((token, token_id) for token_id, token in enumerate(tokens) if token)
        self._longer: dict[int, Words | None] = {}
        self.max_bytes = max(map(len, tokens), default=0)  # of one token
        self.shapes = lru_cache(SHAPES_KEPT)(partial(Shapes, tokens))

    def has(self, token_id: int) -> bool:
        """Whether a token can come: it writes something, or ends a text."""
        return token_id in self.end_ids or (token_id < len(self.tokens) and bool(self.tokens[token_id]))

    def longer_than(self, token_id: int) -> Words | None:
        """The bits of the tokens that begin with ``token_id``'s bytes and go on; None if there are none."""
        if token_id not in self._longer:
            token = self.tokens[token_id]
            first = bisect_left(self._sorted, (token, 0))
            tail = itertools.takewhile(
                lambda pair: pair[0].startswith(token), itertools.islice(self._sorted, first, None)
            )
            found = [other_id for other, other_id in tail if len(other) > len(token)]
            self._longer[token_id] = pack_bits(found, self.num_words) if found and token else None
        return self._longer[token_id]

    @cached_property
    def digest(self) -> str:
        """Names the vocabulary: its tokens in their order, and those that end a text."""
        found = hashlib.sha256(repr(self.end_ids).encode())
        for token in self.tokens:
            found.update(len(token).to_bytes(4) + token)
        return found.hexdigest()

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return dict(reversed(self._sorted))  # of several with the same bytes, the first

    def fewest_tokens(self, text: bytes) -> tuple[int, ...] | None:
        """The fewest tokens that write ``text``; None if no tokens do."""
        best: list[tuple[int, ...] | None] = [*[None] * len(text), ()]
        for start in reversed(range(len(text))):
            for end in range(start + 1, min(start + self.max_bytes, len(text)) + 1):
                token_id, rest = self._ids.get(text[start:end]), best[end]
                if token_id is not None and rest is not None:
                    known = best[start]
                    if known is None or len(rest) + 1 <= len(known):  # of several, the one with the longest token first
                        best[start] = (token_id, *rest)
        return best[0]


def pack_bits(token_ids: Seq[int], num_words: int) -> Words:
    """The set of ``token_ids``."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
