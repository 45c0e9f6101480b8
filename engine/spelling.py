"""How a closed choice is written: where a text goes on in one of a few known ways, each has one spelling, the
tokenizer's own. So what is drawn where spellings part is the probability of a whole label.

Knows no grammar engine; a mask that lacks a spelling is left as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from engine.types import Ids
from engine.vocabulary import Vocabulary, Words, pack_bits

Encode = Callable[[Ids, str], Ids]
"""See Text.encode_after."""

AFTER_ALL_BYTES = b"\xff"
"""Comes after whatever UTF-8 follows a text."""


class Spellings:
    """What may come next, by the tokens written since a choice was near, up to where each text is the only one left."""

    def __init__(self, following: Mapping[Ids, Mapping[int, bool]], vocabulary: Vocabulary) -> None:
        """``following`` says of each next token whether it is certain to be one: nothing longer can stand there."""
        self.following = following
        self.vocabulary = vocabulary


class Way(NamedTuple):
    """Where a row is among spellings."""

    spellings: Spellings
    written: Ids = ()

    def step(self, token_id: int) -> Way | None:
        """After one more token; None behind the last point where texts part, and in another spelling."""
        written = (*self.written, token_id)
        return Way(self.spellings, written) if written in self.spellings.following else None

    @property
    def only(self) -> int | None:
        """The next token, where there is but one."""
        ((token_id, is_certain), *others) = self.spellings.following[self.written].items()
        return token_id if is_certain and not others else None

    def narrow(self, mask: Words) -> bool:
        """Leave the next tokens alone in a mask; False, and no change, if the grammar or a longer token is against."""
        tokens = self.spellings.following[self.written]
        wanted = pack_bits(list(tokens), len(mask))
        if np.any(wanted & ~mask):
            return False
        for token_id, is_certain in tokens.items():
            longer = None if is_certain else self.spellings.vocabulary.longer_than(token_id)
            if longer is not None and np.any(mask & longer):
                return False
        mask[:] = wanted
        return True


def find_spellings(texts: Mapping[str, bool], context: Ids, encode: Encode, vocabulary: Vocabulary) -> Spellings | None:
    """The spellings of texts behind ``context``; each says whether the output ends with it, else more follows.

    None where they cannot be told apart: one begins with another and what follows is not known.
    """
    written = sorted(text.encode() for text in texts)
    following: dict[Ids, dict[int, bool]] = {}
    for text, is_end in texts.items():
        spelled = encode(context, text)
        pieces = [vocabulary.tokens[token_id] for token_id in spelled if token_id < len(vocabulary.tokens)]
        if b"".join(pieces) != text.encode():
            return None
        depth = _depth_alone(pieces, written)
        if depth is None and not is_end:
            return None
        for place in range(len(spelled) if depth is None else depth):
            is_certain = is_end or place + 1 < len(spelled)
            following.setdefault(spelled[:place], {})[spelled[place]] = is_certain
        if depth is None:
            following.setdefault(spelled, {}).update(dict.fromkeys(vocabulary.end_ids, True))
    has_choice = any(len(tokens) > 1 for tokens in following.values())
    return Spellings(following, vocabulary) if has_choice else None


def _depth_alone(pieces: list[bytes], written: list[bytes]) -> int | None:
    """The number of tokens behind which no other text is possible; None if there is always another one."""
    begun = b""
    for depth, piece in enumerate(pieces, 1):
        begun += piece
        if bisect_left(written, begun + AFTER_ALL_BYTES) - bisect_left(written, begun) == 1:
            return depth
    return None
