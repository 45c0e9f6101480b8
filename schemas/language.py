"""The texts that a grammar engine can write, as trees: how short and how long they are.

Regular expressions, EBNF and the normal form of JSON Schemas all become such trees. Lengths are in bytes of UTF-8,
``inf`` where there is no bound. Knows no grammar engine and no tokens.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Protocol

from schemas import ebnf, regex
from schemas.regex import Ranges

Length = float
"""Bytes: whole, or ``inf``."""


class Leaf(Protocol):
    """A part with a memory of its own. Equal leaves behave alike."""

    @property
    def longest(self) -> Length:
        """Most bytes that it can still write."""

    def step(self, char: str) -> "Leaf | None":
        """What is left after one character; None if it does not fit."""

    def shortest(self) -> str | None:
        """The shortest text to an end, "" at one; None if there is none."""


@dataclass(frozen=True, eq=False)
class Chars:
    """One character out of ``ranges``."""

    ranges: Ranges

    @cached_property
    def favourite(self) -> str:
        """A character of the fewest bytes, if possible one that reads well."""
        readable = regex.intersection(self.ranges, READABLE)
        return chr((readable or self.ranges)[0][0])

    @property
    def longest(self) -> Length:
        """Bytes of the last character."""
        return num_bytes(chr(self.ranges[-1][1]))

    def shortest(self) -> str:
        """A whole character."""
        return self.favourite


@dataclass(frozen=True, eq=False)
class Join:
    """The items one after the other."""

    items: tuple["Tree", ...]


@dataclass(frozen=True, eq=False)
class Either:
    """Any one of the options; none at all is no text."""

    options: tuple["Tree", ...]


@dataclass(frozen=True, eq=False)
class Many:
    """``low`` to ``high`` (None: any number) times the item."""

    item: "Tree"
    low: int
    high: int | None


@dataclass(frozen=True, eq=False)
class Rule:
    """The rule of that name."""

    name: str


Tree = str | Chars | Join | Either | Many | Rule | Leaf
READABLE: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A))


def optional(tree: Tree) -> Tree:
    """Nothing or ``tree``."""
    return Either(("", tree))


def num_bytes(text: str) -> int:
    """Bytes of ``text`` in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


class Language:
    """The trees of one grammar."""

    def __init__(self, root: Tree, rules: Mapping[str, Tree] | None = None) -> None:
        self.root = root
        self.rules = _reachable(root, rules or {})

    @cached_property
    def lengths(self) -> dict[str, Length]:
        """The shortest text of each rule."""
        found: dict[str, Length] = dict.fromkeys(self.rules, math.inf)
        has_changed = True
        while has_changed:
            has_changed = False
            for name, tree in self.rules.items():
                if (length := _shortest(tree, found)) < found[name]:
                    found[name], has_changed = length, True
        return found

    def length_of(self, tree: Tree) -> Length:
        """The shortest text of a tree; ``inf`` if it has none."""
        return _shortest(tree, self.lengths)

    @cached_property
    def longest(self) -> Length:
        """The longest text; ``inf`` if there is none, or if rules are recursive."""
        if self._order is None:
            return math.inf
        found: dict[str, Length] = {}
        for name in self._order:
            found[name] = _longest(self.rules[name], found)
        return _longest(self.root, found)

    @cached_property
    def _order(self) -> list[str] | None:
        """The rules, those that others use first; None if one uses itself."""
        graph = {name: set(_names(tree)) for name, tree in self.rules.items()}
        try:
            return list(TopologicalSorter(graph).static_order())
        except CycleError:
            return None


def _parts(tree: Tree) -> tuple[Tree, ...]:
    if isinstance(tree, Join):
        return tree.items
    if isinstance(tree, Either):
        return tree.options
    return (tree.item,) if isinstance(tree, Many) else ()


def _names(tree: Tree) -> Iterable[str]:
    if isinstance(tree, Rule):
        yield tree.name
    for part in _parts(tree):
        yield from _names(part)


def _reachable(root: Tree, rules: Mapping[str, Tree]) -> dict[str, Tree]:
    """The rules that ``root`` uses, in their order."""
    queue, used = list(_names(root)), set[str]()
    while queue:
        name = queue.pop()
        if name not in used:
            used.add(name)
            queue += _names(rules[name])
    return {name: tree for name, tree in rules.items() if name in used}


def _times(count: float, length: Length) -> Length:
    return count * length if count and length else 0


def _shortest(tree: Tree, rules: Mapping[str, Length]) -> Length:
    if isinstance(tree, str):
        return num_bytes(tree)
    if isinstance(tree, Rule):
        return rules[tree.name]
    if isinstance(tree, Many):
        return _times(tree.low, _shortest(tree.item, rules))
    if isinstance(tree, Join):
        return sum(_shortest(item, rules) for item in tree.items)
    if isinstance(tree, Either):
        return min((_shortest(option, rules) for option in tree.options), default=math.inf)
    text = tree.shortest()
    return math.inf if text is None else num_bytes(text)


def _longest(tree: Tree, rules: Mapping[str, Length]) -> Length:
    if isinstance(tree, str):
        return num_bytes(tree)
    if isinstance(tree, Rule):
        return rules[tree.name]
    if isinstance(tree, Many):
        return _times(math.inf if tree.high is None else tree.high, _longest(tree.item, rules))
    if isinstance(tree, Join):
        return sum(_longest(item, rules) for item in tree.items)
    if isinstance(tree, Either):
        return max((_longest(option, rules) for option in tree.options), default=0)
    return tree.longest


def from_regex(node: regex.Node, chars: Callable[[Ranges], Tree] = Chars) -> Tree:
    """The language of a tree without anchors; ``chars`` says how a character is written."""
    if isinstance(node, regex.Chars):
        return chars(node.ranges)
    if isinstance(node, regex.Repeat):
        return Many(from_regex(node.item, chars), node.low, node.high)
    if isinstance(node, regex.Seq):
        return Join(tuple(from_regex(item, chars) for item in node.items))
    return Either(tuple(from_regex(option, chars) for option in getattr(node, "options", ())))


def from_ebnf(grammar: ebnf.Grammar) -> Language:
    """The language of a grammar. ``e ::= e "+" t | t`` becomes ``e ::= t ("+" t)*``."""
    rules = {name: _unrolled(name, options) for name, options in grammar.items()}
    return Language(Rule(ebnf.ROOT), rules)


def _unrolled(name: str, options: list[tuple[ebnf.Symbol, ...]]) -> Tree:
    itself = ebnf.Ref(name)
    first = Either(tuple(_row(option) for option in options if option[:1] != (itself,)))
    tails = tuple(_row(option[1:]) for option in options if option[:1] == (itself,) and len(option) > 1)
    return Join((first, Many(Either(tails), 0, None))) if tails else first


def _row(symbols: tuple[ebnf.Symbol, ...]) -> Tree:
    return Join(tuple(Rule(symbol.name) if isinstance(symbol, ebnf.Ref) else Chars(symbol) for symbol in symbols))
