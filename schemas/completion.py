"""Walks a language character by character and knows from each place the shortest way to an end.

A place is a set of stacks of what is still to be written. Places are kept and linked as texts reach them, so rows of
one job walk through the same ones: a step is a look-up. Left recursion and wild ambiguity raise TooComplex.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from schemas.language import READABLE, Chars, Either, Join, Language, Leaf, Length, Many, Rule, Tree, num_bytes
from schemas.regex import MAX_CODEPOINT, Ranges, intersection

MAX_KEPT = 50_000
"""Stacks kept; beyond, all are forgotten."""
MAX_STACKS = 20_000
"""Stacks looked at for one place."""
MAX_SEARCHED = 5_000
"""Places looked at for the shortest text that several languages share."""


MAX_LEAD = 4
"""Characters before a choice from which on it is near."""
MAX_KNOWN = 8
"""Characters after a choice that are looked at, as far as they are known."""


Edges = tuple[int, ...]
"""Code points, ascending."""


class TooComplex(Exception):
    """The grammar is left-recursive or ambiguous beyond what is followed."""


class Stack:
    """What is still to be written, the next part on top."""

    __slots__ = ("length", "rest", "top")

    def __init__(self, top: Tree, rest: Stack | None, length: Length) -> None:
        self.top = top
        self.rest = rest
        self.length = length  # fewest bytes until it is empty


class Place:
    """Where a text is in a language."""

    __slots__ = ("_edges", "_following", "_walker", "is_end", "length", "stacks")

    def __init__(self, walker: Walker, stacks: tuple[Stack, ...], *, is_end: bool) -> None:
        self._walker = walker
        self._following: dict[str, Place] = {}
        self._edges: Edges | None = None
        self.stacks = stacks
        self.is_end = is_end
        self.length: Length = 0 if is_end else min((stack.length for stack in stacks), default=math.inf)

    @property
    def edges(self) -> Edges:
        """The code points at which what may come changes: characters between two of them lead to the same place.

        Empty where only known texts may come, and where that is not known.
        """
        if self._edges is None:
            tops = [stack.top for stack in self.stacks]
            kinds = {type(top) for top in tops}
            self._edges = tuple(_edges_of(tops)) if Chars in kinds and kinds <= {str, Chars} else ()
        return self._edges

    @property
    def is_dead(self) -> bool:
        """Whether no text of the language begins so."""
        return not self.stacks and not self.is_end

    def step(self, char: str) -> Place:
        """The place after one more character."""
        return self._following.get(char) or self._follow(char)

    def walk(self, text: str) -> Place:
        """The place after more text."""
        place = self
        for char in text:  # each token of each row: one look-up, no calls
            place = place._following.get(char) or place._follow(char)
        return place

    def _follow(self, char: str) -> Place:
        following = self._following[char] = self._walker.follow(self, char)
        return following

    def within(self, low: int, high: int) -> Iterator[str]:
        """One character of each set of those between two code points that go on from here."""
        for stack in self.stacks:
            if isinstance(stack.top, Chars) and (ranges := intersection(stack.top.ranges, ((low, high),))):
                yield chr(ranges[0][0])
            elif isinstance(stack.top, str) and low <= ord(stack.top[0]) <= high:
                yield stack.top[0]
            elif isinstance(stack.top, _Shared):
                for place in stack.top.included:
                    yield from place.within(low, high)

    def alternatives(self, most: int) -> dict[str, bool]:
        """The ways to go on, where they are few and each is one known text; whether that ends the whole text.

        Texts go as far as they are known. Empty where there is no choice near, or another one.
        """
        lead, place = self._known(MAX_LEAD)
        tops = [stack.top for stack in place.stacks]
        num_ways = len(tops) + place.is_end
        if not 2 <= num_ways <= most or not all(isinstance(top, str) for top in tops):
            return {}
        found = {lead: True} if place.is_end else {}
        for stack in place.stacks:
            known, after = self._walker.place_of(stack.rest)._known(MAX_KNOWN)
            text = f"{lead}{stack.top}{known}"
            found[text] = after.is_end and not after.stacks and found.get(text, True)
        return found

    def _known(self, max_chars: int) -> tuple[str, Place]:
        """About so many characters that must come next, and the place after them."""
        text, place = "", self
        while len(text) < max_chars and len(place.stacks) == 1 and not place.is_end:
            top = place.stacks[0].top
            if not isinstance(top, str):
                break
            text, place = text + top, place.walk(top)
        return text, place

    def completion(self) -> str:
        """The shortest text to an end; only where there is one."""
        if self.is_end:
            return ""
        stack: Stack | None = min(self.stacks, key=lambda stack: stack.length)
        parts = []
        while stack is not None:
            parts.append(self._walker.shortest(stack.top))
            stack = stack.rest
        return "".join(parts)


class Walker:
    """The places of one language."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._stacks: dict[tuple[Tree, Stack | None], Stack] = {}
        self._places: dict[tuple[bool, frozenset[Stack]], Place] = {}
        self._taken_apart: dict[tuple[Stack | None, ...], Place] = {}
        self._fewer: dict[tuple[Tree, int, int | None], Many] = {}
        self._shortest: dict[Tree, str] = {}

    def start(self, tree: Tree | None = None) -> Place:
        """The place before any text, of the language or of one tree. Raises TooComplex, as ``step`` does."""
        return self._place((self._push(self._language.root if tree is None else tree, None),))

    def place_of(self, stack: Stack | None) -> Place:
        """The place where this is still to be written."""
        return self._place((stack,))

    def follow(self, place: Place, char: str) -> Place:
        """The place after ``place`` and a character."""
        if len(self._stacks) > MAX_KEPT:
            self._make_room()
        code = ord(char)
        left: list[Stack | None] = []
        for stack in place.stacks:
            top = stack.top
            if isinstance(top, str):
                if top[0] == char:
                    left.append(self._push(top[1:], stack.rest))
            elif isinstance(top, Chars):
                if any(low <= code <= high for low, high in top.ranges):
                    left.append(stack.rest)
            elif (leaf := top.step(char)) is not None:  # type: ignore[union-attr]
                left.append(self._push(leaf, stack.rest))
        return self._place(tuple(left))

    def shortest(self, tree: Tree) -> str:
        """The shortest text of a tree that has one."""
        if isinstance(tree, str):
            return tree
        if tree not in self._shortest:
            self._shortest[tree] = self._find_shortest(tree)
        return self._shortest[tree]

    def _find_shortest(self, tree: Tree) -> str:
        if isinstance(tree, Rule):
            return self.shortest(self._language.rules[tree.name])
        if isinstance(tree, Many):
            return self.shortest(tree.item) * tree.low if tree.low else ""
        if isinstance(tree, Join):
            return "".join(map(self.shortest, tree.items))
        if isinstance(tree, Either):
            return self.shortest(min(tree.options, key=self._language.length_of))
        text = tree.shortest()  # type: ignore[union-attr]
        assert text is not None, "a stack whose length is known has a text"
        return text

    def _push(self, top: Tree, rest: Stack | None) -> Stack | None:
        if top == "":
            return rest
        key = (top, rest)
        stack = self._stacks.get(key)
        if stack is None:
            length = self._language.length_of(top) + (rest.length if rest else 0)
            stack = self._stacks[key] = Stack(top, rest, length)
        return stack

    def _place(self, stacks: tuple[Stack | None, ...]) -> Place:
        """The place with these stacks; most characters leave the same ones as another did."""
        place = self._taken_apart.get(stacks)
        if place is None:
            place = self._taken_apart[stacks] = self._find_place(stacks)
        return place

    def _find_place(self, stacks: Iterable[Stack | None]) -> Place:
        """Take the stacks apart until a character is on top of each."""
        queue, seen, left = list(stacks), set[Stack | None](), dict[Stack, None]()  # in order: ties end alike each time
        while queue:
            stack = queue.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if len(seen) > MAX_STACKS:
                raise TooComplex
            if stack is None or stack.length == math.inf:
                continue
            if isinstance(stack.top, str | Chars):
                left[stack] = None
            else:
                queue += self._take_apart(stack, left)
        key = (None in seen, frozenset(left))
        if key not in self._places:
            self._places[key] = Place(self, tuple(left), is_end=None in seen)
        return self._places[key]

    def _take_apart(self, stack: Stack, left: dict[Stack, None]) -> list[Stack | None]:
        top, rest = stack.top, stack.rest
        if isinstance(top, Rule):
            return [self._push(self._language.rules[top.name], rest)]
        if isinstance(top, Either):
            return [self._push(option, rest) for option in top.options]
        if isinstance(top, Join):
            for item in reversed(top.items):
                rest = self._push(item, rest)
            return [rest]
        if isinstance(top, Many):
            skipped = [rest] if top.low == 0 else []
            if top.high == 0:
                return skipped
            fewer = self._with_fewer(top)
            return [*skipped, self._push(top.item, rest if fewer.high == 0 else self._push(fewer, rest))]
        left[stack] = None
        return [rest] if stack.top.shortest() == "" else []  # type: ignore[union-attr]

    def _with_fewer(self, tree: Many) -> Many:
        low, high = max(0, tree.low - 1), tree.high if tree.high is None else tree.high - 1
        if (low, high) == (tree.low, tree.high):
            return tree
        return self._fewer.setdefault((tree.item, low, high), Many(tree.item, low, high))

    def _make_room(self) -> None:
        """Forget the places: texts under way keep theirs alive."""
        self._stacks.clear()
        self._places.clear()
        self._taken_apart.clear()
        self._fewer.clear()


def shared(included: Iterable[Tree], excluded: Iterable[Tree] = ()) -> Leaf:
    """The texts that all of ``included`` have and none of ``excluded``; these hold characters only, no rules."""
    languages = [Language(tree) for tree in included]
    places = tuple(Walker(language).start() for language in languages)
    longest = min(language.longest for language in languages)
    return _Shared(places, tuple(Walker(Language(tree)).start() for tree in excluded), longest)


@dataclass(frozen=True)
class _Shared:
    """Places in several languages at once."""

    included: tuple[Place, ...]
    excluded: tuple[Place, ...]

    longest: Length

    def step(self, char: str) -> _Shared | None:
        following = self.follow(char)
        return None if following is None or following.shortest() is None else following

    def follow(self, char: str) -> _Shared | None:
        included = tuple(place.step(char) for place in self.included)
        if any(place.is_dead for place in included):
            return None
        return _Shared(included, tuple(place.step(char) for place in self.excluded), self.longest)

    def shortest(self) -> str | None:
        return _search(self)

    @property
    def is_end(self) -> bool:
        return all(place.is_end for place in self.included) and not any(place.is_end for place in self.excluded)

    def chars(self) -> Iterator[str]:
        """One character of each set of those that the places tell apart."""
        tops = [stack.top for place in (*self.included, *self.excluded) for stack in place.stacks]
        for low, after in itertools.pairwise([*_edges_of(tops), MAX_CODEPOINT + 1]):
            if low < after:
                yield chr((intersection(READABLE, ((low, after - 1),)) or ((low, low),))[0][0])


def _edges_of(tops: Iterable[Tree]) -> list[int]:
    ranges = [pair for top in tops for pair in _ranges(top)]
    return sorted({low for low, _ in ranges} | {high + 1 for _, high in ranges})


def _ranges(top: Tree) -> Ranges:
    if isinstance(top, str):
        return ((ord(top[0]), ord(top[0])),)
    assert isinstance(top, Chars), "shared languages hold characters only"
    return top.ranges


@lru_cache(maxsize=2**14)
def _search(start: _Shared) -> str | None:
    """The shortest text that ends all of the included and none of the excluded; None if there is none in reach."""
    order = itertools.count()
    queue, seen = [(0, next(order), "", start)], set[_Shared]()
    while queue and len(seen) <= MAX_SEARCHED:
        length, _, text, shared = heapq.heappop(queue)
        if shared.is_end:
            return text
        if shared in seen:
            continue
        seen.add(shared)
        for char in shared.chars():
            if (following := shared.follow(char)) is not None and following not in seen:
                heapq.heappush(queue, (length + num_bytes(char), next(order), text + char, following))
    return None
