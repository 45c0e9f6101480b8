"""Ends a document before its budget does: a draw after which it could no longer end is replaced by the shortest end.

A row pays nothing until its budget is as small as the longest of the shortest ends. Knows no scheduling and no grammar
engine; the matcher has the last word on what is appended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

from engine.types import Ids, Matcher, Sequence
from engine.vocabulary import Vocabulary
from schemas.completion import Place, TooComplex, Walker
from schemas.constraints import language_of
from schemas.language import Language, Length
from schemas.records import Constraint
from schemas.regex import MAX_CODEPOINT

ENDS_KEPT = 4096
NO_CHAR = "\0"  # no language has it


class Position(NamedTuple):
    """Where an output is: a place, and the bytes of a character that is not whole yet."""

    place: Place
    open: bytes = b""

    def walk(self, text: bytes) -> Position:
        """The position after more output."""
        text = self.open + text
        try:
            return Position(self.place.walk(text.decode()))
        except UnicodeDecodeError as error:
            place = self.place.walk(text[: error.start].decode())
            is_cut = error.reason == "unexpected end of data"
            return Position(place, text[error.start :]) if is_cut else Position(place.step(NO_CHAR))

    @property
    def length(self) -> Length:
        """Bytes of the shortest end; ``inf`` if none is known."""
        rest, place = self._whole()
        return len(rest) + place.length

    def end(self) -> bytes:
        """The shortest end; only where there is one."""
        rest, place = self._whole()
        return rest + place.completion().encode()

    def _whole(self) -> tuple[bytes, Place]:
        """What is missing of the open character, of several the one that ends soonest, and the place after it."""
        if not self.open:
            return b"", self.place
        chars = self.place.within(*_code_points(self.open))
        best = min(chars, key=lambda char: self.place.step(char).length, default=NO_CHAR)
        return best.encode()[len(self.open) :], self.place.step(best)


def _code_points(start: bytes) -> tuple[int, int]:
    """The first and last character whose UTF-8 begins with ``start``, which is cut."""
    num = 2 if start[0] < 0xE0 else 3 if start[0] < 0xF0 else 4
    value = start[0] & (0x7F >> num)
    for byte in start[1:]:
        value = value << 6 | byte & 0x3F
    shift = 6 * (num - len(start))
    return max(value << shift, (0, 0, 0x80, 0x800, 0x10000)[num]), min((value + 1 << shift) - 1, MAX_CODEPOINT)


class Closer:
    """What is known of one grammar; its rows share it."""

    def __init__(self, language: Language, vocabulary: Vocabulary) -> None:
        self.language = language
        self.vocabulary = vocabulary
        self.walker = Walker(language)
        self.is_given_up = False  # the grammar is too complex to be followed
        self.fewest_tokens = lru_cache(ENDS_KEPT)(vocabulary.fewest_tokens)
        language.farthest_within(0)  # what the rows ask, found out here

    def first(self) -> Position | None:
        """See Places.first."""
        try:
            return None if self.is_given_up else Position(self.walker.start())
        except TooComplex:
            self.is_given_up = True
            return None

    def after(self, place: Position, token_id: int) -> Position | None:
        """See Places.after; a text that the language does not have, whatever the engine's grammar says, is nowhere."""
        try:
            position = place.walk(self.vocabulary.tokens[token_id])
        except TooComplex:
            self.is_given_up = True
            return None
        return None if position.place.is_dead else position

    def start(self, max_tokens: int) -> Closing | None:
        """Watch over a new row; None if its output cannot be longer than ``max_tokens``, or if nothing can be done."""
        if self.is_given_up or max_tokens >= self.language.longest:
            return None
        return Closing(self)


def make_closer(constraint: Constraint, vocabulary: Vocabulary) -> Closer | None:
    """What ends the rows of a constraint; None for one that is nested too deeply to be followed."""
    try:
        return Closer(language_of(constraint), vocabulary)
    except RecursionError:
        return None


class Closing:
    """Watches over the budget of one row."""

    def __init__(self, closer: Closer) -> None:
        self._closer = closer
        self._position: Position | None = None
        self._num_walked = 0  # tokens of the answer
        self._num_openers = 0

    def replace(self, sequence: Sequence, matcher: Matcher, token_ids: Ids) -> Ids | None:
        """The tokens that end the output in the place of ``token_ids``, if those would leave too little of the budget.

        The matcher has accepted ``token_ids``, which the sequence does not have yet, and then the tokens returned.
        """
        num_left = sequence.max_tokens - sequence.num_output - len(token_ids)
        if self._closer.is_given_up or num_left > self._farthest(token_ids):
            return None
        try:
            return self._find(sequence, matcher, token_ids, num_left)
        except TooComplex:
            self._closer.is_given_up = True
            return None

    def _farthest(self, token_ids: Ids) -> Length:
        """How long the shortest end can be by now."""
        language, tokens = self._closer.language, self._closer.vocabulary.tokens
        if language.farthest == math.inf:
            text = b"".join(tokens[token_id] for token_id in token_ids)
            self._num_openers += sum(text.count(opener.encode()) for opener in language.openers)
        return language.farthest_within(self._num_openers)

    def _find(self, sequence: Sequence, matcher: Matcher, token_ids: Ids, num_left: int) -> Ids | None:
        position = self._position or Position(self._closer.walker.start())
        before = self._walk(position, sequence.token_ids[sequence.answer_start + self._num_walked :])
        after = self._walk(before, token_ids)
        if not self._fits(after, num_left):
            end = self._end(before)
            if end is not None and len(end) <= num_left + len(token_ids) and exchange(matcher, token_ids, end):
                return end
        self._position, self._num_walked = after, sequence.num_answered + len(token_ids)
        return None

    def _walk(self, position: Position, token_ids: Seq[int]) -> Position:
        tokens = self._closer.vocabulary.tokens
        return position.walk(b"".join(tokens[token_id] for token_id in token_ids))

    def _fits(self, position: Position, num_tokens: int) -> bool:
        if position.length <= num_tokens:
            return True
        if position.length > num_tokens * self._closer.vocabulary.max_bytes:
            return False
        end = self._end(position)
        return end is not None and len(end) <= num_tokens

    def _end(self, position: Position) -> Ids | None:
        return None if position.length == math.inf else self._closer.fewest_tokens(position.end())


def exchange(matcher: Matcher, old: Ids, new: Ids) -> bool:
    """Move the matcher from behind ``old`` to behind ``new`` if it can end there; else nothing changes."""
    matcher.rollback(len(old))
    accepted = list(itertools.takewhile(matcher.accept, new))
    if len(accepted) == len(new) and matcher.can_end():
        return True
    matcher.rollback(len(accepted))
    for token_id in old:
        matcher.accept(token_id)
    return False
