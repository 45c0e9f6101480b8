"""Tokenise texts that begin alike: what they share is encoded once. Gives exactly the tokenizer's own ids.

A byte-level tokenizer cuts a text before it merges, and always where a blank follows something else, so the ids of the
two sides of such a place do not depend on each other. Knows no requests.
"""

import json
from collections.abc import Callable
from typing import Any

MIN_SHARED_CHARS = 64
MAX_STARTS = 8
"""Starts kept, the last used first: one for each template in flight."""

Encode = Callable[[str], list[int]]


def cuts_at_blanks(backend: Any) -> bool:
    """Whether a tokenizers.Tokenizer is byte-level, so that blanks are safe places to cut."""
    return '"ByteLevel"' in json.dumps(json.loads(backend.to_str()).get("pre_tokenizer"))


class SharedStart:
    """Encodes one text after the other."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._starts: list[tuple[str, list[int]]] = []  # a start with the blank after it, and the ids without the blank
        self._previous = ""
        self._is_exact = True

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        for index, (start, ids) in enumerate(self._starts):
            if text.startswith(start):
                self._starts.insert(0, self._starts.pop(index))
                return ids + self._encode(text[len(start) - 1 :])
        ids = self._encode(text)
        if self._is_exact:
            self._learn(text, ids)
        self._previous = text
        return ids

    def _learn(self, text: str, ids: list[int]) -> None:
        """Keep what ``text`` shares with the text before it, if it is long and the ids agree."""
        end = last_cut(text, _num_shared(text, self._previous))
        if end < MIN_SHARED_CHARS:
            return
        start, rest = self._encode(text[:end]), self._encode(text[end:])
        if start + rest != ids:
            self._is_exact = False
            return
        self._starts.insert(0, (text[: end + 1], start))
        del self._starts[MAX_STARTS:]


def last_cut(text: str, end: int) -> int:
    """The last place before ``end`` where a blank follows something else, so that no token reaches across; or 0, -1."""
    end = text.rfind(" ", 0, end)
    while end > 0 and text[end - 1].isspace():
        end = text.rfind(" ", 0, end)
    return end


def _num_shared(one: str, other: str) -> int:
    """Length of the common start, by bisection: comparing slices is far faster than comparing characters."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
