"""Prompt text to token ids: the special tokens of a template control, their names in data stay text.

Gives exactly the tokenizer's own ids where data holds no such name. Knows no chat templates and no requests.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from engine.shared_start import SharedStart, cuts_at_blanks

Ids = tuple[int, ...]
Spans = Iterable[tuple[int, int]]

LITERAL = "\ufdd0"
"""Put around names that are text, until they are encoded; a code point that Unicode gives to nobody."""

PIECES_KEPT, LONGEST_PIECE_KEPT = 64, 2**16
"""What all rows of a template share is encoded once; longer pieces are hardly shared and would fill memory."""


class Encoder:
    """Encodes with one fast tokenizer. Special tokens cut a text, so the pieces between them are encoded one by one."""

    def __init__(self, backend: Any, control_ids: Mapping[str, int]) -> None:
        """``backend`` is a tokenizers.Tokenizer, ``control_ids`` the tokens that data must never become, by name."""
        self._backend = backend
        self._encode_long = SharedStart(self.encode_plain).encode if cuts_at_blanks(backend) else self.encode_plain
        self._ids = {name: token_id for name, token_id in control_ids.items() if len(name) > 1}
        self._name = _any_of(self._ids)
        self._cut = re.compile(f"({LITERAL}.+?{LITERAL}|{_any_of(filter(self._cuts, self._ids)).pattern})", re.DOTALL)
        self._start: list[int] = backend.encode("", add_special_tokens=True).ids
        self._adds_only_a_start = backend.encode("a", add_special_tokens=True).ids == self._start + self.encode_plain(
            "a"
        )
        self._kept = lru_cache(PIECES_KEPT)(self._encode_between)

    def protect(self, text: str) -> str:
        """Mark every name of a control token, for ``encode``."""
        return self.protect_spans(text.replace(LITERAL, ""), ((0, len(text)),))

    def protect_spans(self, text: str, spans: Spans) -> str:
        """Mark the names that lie in ``spans``, or reach into one."""

        def mark(found: re.Match[str]) -> str:
            is_data = any(start < found.end() and found.start() < end for start, end in spans)
            return f"{LITERAL}{found[0]}{LITERAL}" if is_data else found[0]

        return self._name.sub(mark, text)

    def encode(self, text: str) -> list[int]:
        """Tokenise without adding special tokens; names that are marked become text, others the tokens they name."""
        ids: list[int] = []
        before = ""
        pieces = [*self._cut.split(text), ""]  # pieces of text and what cuts them, in turns
        for index, (piece, after) in enumerate(pairwise(pieces)):
            if index % 2 == 0:
                ids += self._encode_piece(before, piece, after if after in self._ids else "")
            elif piece in self._ids:
                ids.append(self._ids[piece])
                before = piece
            else:
                ids += self._encode_literally(piece.strip(LITERAL))
                before = ""
        return ids

    def _encode_piece(self, before: str, piece: str, after: str) -> Ids:
        if not piece:
            return ()
        encode = self._kept if len(piece) <= LONGEST_PIECE_KEPT else self._encode_between
        return encode(before, piece, after)

    def _encode_literally(self, text: str) -> Ids:
        """Encode in parts of which none names a control token: each name is cut behind its first character."""
        if (found := self._name.search(text)) is None:
            return self._encode(text)
        cut = found.start() + 1
        return self._encode_literally(text[:cut]) + self._encode_literally(text[cut:])

    def _encode_between(self, before: str, piece: str, after: str) -> Ids:
        """Encode with the special tokens around it: some swallow blanks, and some tokenizers mark a text's start."""
        ids = self._encode_long(before + piece + after)
        return tuple(ids[bool(before) : len(ids) - bool(after)])

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise as the tokenizer does, without adding special tokens."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_with_start(self, text: str) -> list[int]:
        """Tokenise as the tokenizer does, its special tokens added."""
        if self._adds_only_a_start:
            return self._start + self._encode_long(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        return ids

    def _encode(self, text: str) -> Ids:
        return tuple(self.encode_plain(text))

    def _cuts(self, name: str) -> bool:
        """Whether the tokenizer finds the name wherever it stands."""
        ids = self._encode(f"{name}a{name}")
        return len(ids) > 2 and ids[0] == ids[-1] == self._ids[name]


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Match any of the names, the longest first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
