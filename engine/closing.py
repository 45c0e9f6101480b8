"""Ends a document before its budget does: a draw after which it could no longer end is replaced by the shortest end.

How far the end is depends on a row's place in the language only. Knows no scheduling and no grammar engine; the matcher
has the last word on what is appended.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import NamedTuple

from engine.spelling import Encode, Spellings, find_spellings
from engine.states import SharedMatcher
from engine.types import Ids, Matcher, Sequence
from engine.vocabulary import NO_SHAPES, Shapes, Vocabulary
from schemas.completion import Place, TooComplex, Walker
from schemas.constraints import language_of
from schemas.language import Language, Length
from schemas.records import Constraint
from schemas.regex import MAX_CODEPOINT

ENDS_KEPT = 4096
MAX_SPELLED = 1_024
"""Texts of one choice; those of a larger one may be spelled in any way."""
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
        if not self.open:
            return self.place.length
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
    """Follows one grammar, and ends its rows in time."""

    def __init__(self, language: Language, vocabulary: Vocabulary, encode: Encode | None = None) -> None:
        """``encode`` spells closed choices, which else may be spelled in any way."""
        self.vocabulary = vocabulary
        self._encode = encode
        self._alternatives = lru_cache(ENDS_KEPT)(Place.alternatives)
        self._spellings = lru_cache(ENDS_KEPT)(self._find_spellings)
        self._longest = language.longest
        self._walker = Walker(language)
        self._is_given_up = False  # the grammar is too complex to be followed
        self._end = lru_cache(ENDS_KEPT)(self._find_end)

    def first(self) -> Position | None:
        """See Places.first."""
        try:
            return None if self._is_given_up else Position(self._walker.start())
        except TooComplex:
            self._is_given_up = True
            return None

    def after(self, place: Position, token_id: int) -> Position | None:
        """See Places.after; a text that the language does not have, whatever the engine's grammar says, is nowhere."""
        if self._is_given_up:
            return None
        try:
            position = place.walk(self.vocabulary.tokens[token_id])
        except TooComplex:
            self._is_given_up = True
            return None
        return None if position.place.is_dead else position

    def shapes(self, place: Position) -> Shapes:
        """See Places.shapes."""
        edges = place.place.edges
        return NO_SHAPES if place.open or not edges else self.vocabulary.shapes(edges)

    def is_alike(self, place: Position, token_id: int) -> bool:
        """See Places.is_alike."""
        step, edges = place.place, place.place.edges
        for char in self.vocabulary.tokens[token_id].decode():
            if step.edges != edges:
                return False
            step = step.step(char)
        return not self._has_choice(step)

    def spellings(self, place: Position, context: Ids) -> Spellings | None:
        """See Places.spellings."""
        is_choice = self._encode is not None and not place.open and self._has_choice(place.place)
        return self._spellings(place.place, context) if is_choice else None

    def _has_choice(self, place: Place) -> bool:
        try:
            return bool(self._alternatives(place, MAX_SPELLED))
        except TooComplex:
            return False

    def _find_spellings(self, place: Place, context: Ids) -> Spellings | None:
        assert self._encode is not None, "nothing is spelled without it"
        return find_spellings(self._alternatives(place, MAX_SPELLED), context, self._encode, self.vocabulary)

    def is_needed(self, max_tokens: int) -> bool:
        """Whether an output may be longer than ``max_tokens``."""
        return max_tokens < self._longest

    def replace(self, sequence: Sequence, matcher: SharedMatcher, token_ids: Ids) -> Ids | None:
        """The tokens that end the output in the place of ``token_ids``, if those would leave too little of the budget.

        The matcher has accepted ``token_ids``, which the sequence does not have yet, and then the tokens returned.
        """
        before: Position | None = matcher.place_before(len(token_ids))
        if before is None or self._is_given_up:
            return None
        after: Position = matcher.place_before(0) or before  # out of the language it comes no closer to an end
        num_left = sequence.max_tokens - sequence.num_output - len(token_ids)
        try:
            if self._fits(after, num_left):
                return None
            end = self._end(before)
        except TooComplex:
            self._is_given_up = True
            return None
        if end is None or len(end) > num_left + len(token_ids):
            return None
        return end if exchange(matcher, token_ids, end) else None

    def _fits(self, position: Position, num_tokens: int) -> bool:
        length = position.length
        if length <= num_tokens:
            return True
        if length > num_tokens * self.vocabulary.max_bytes:
            return False
        end = self._end(position)
        return end is not None and len(end) <= num_tokens

    def _find_end(self, position: Position) -> Ids | None:
        """The fewest tokens that write the shortest end; None if no tokens do, or if there is none."""
        return None if position.length == math.inf else self.vocabulary.fewest_tokens(position.end())


def make_closer(constraint: Constraint, vocabulary: Vocabulary, encode: Encode | None = None) -> Closer | None:
    """What ends the rows of a constraint; None for one that is nested too deeply to be followed."""
    try:
        return Closer(language_of(constraint), vocabulary, encode)
    except RecursionError:
        return None


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
