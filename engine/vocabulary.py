"""The tokens that grammars are matched with, as bytes, and sets of them as bits. Knows no grammar engine."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.int32]]
"""One bit a token, as in a mask."""


class Vocabulary:
    """Tokens by number, and sorted, to find those that begin with another one."""

    def __init__(self, tokens: Seq[bytes]) -> None:
        self.tokens = tokens
        self.num_words = -(-len(tokens) // 32)
        self._sorted = sorted((token, token_id) for token_id, token in enumerate(tokens) if token)
        self._longer: dict[int, Words | None] = {}

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


def pack_bits(token_ids: Seq[int], num_words: int) -> Words:
    """The set of ``token_ids``."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
