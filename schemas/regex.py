"""The regular expressions that the grammar engine and Python's ``re`` read alike: parse, restrict, print.

A pattern becomes a small tree of explicit character ranges, so no shorthand is left that two engines could read
differently. Knows nothing of JSON, schemas or tokens.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MAX_CODEPOINT = 0x10FFFF
MAX_REPEAT = 10_000
"""Largest bound of ``{m,n}``."""

Ranges = tuple[tuple[int, int], ...]
"""Sorted, disjoint, inclusive ranges of code points."""


class RegexError(ValueError):
    """The pattern is malformed or outside the dialect; the message names construct and position."""


@dataclass(frozen=True)
class Chars:
    """One character out of ``ranges``."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """The items one after the other."""

    items: tuple["Node", ...]


@dataclass(frozen=True)
class Alt:
    """Any one of the options; none at all matches nothing."""

    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """``low`` to ``high`` (None: any number) times the item."""

    item: "Node"
    low: int
    high: int | None


@dataclass(frozen=True)
class Anchor:
    """``^`` or ``$``."""

    at_start: bool


Node = Chars | Seq | Alt | Repeat | Anchor
EMPTY = Seq(())
NOTHING = Alt(())


def union(*sets: Iterable[tuple[int, int]]) -> Ranges:
    """Merge ranges into sorted, disjoint ones."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(r for ranges in sets for r in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """All code points but NUL, the surrogates and ``ranges``."""
    result, start = [], 0
    for low, high in union(ranges, ((0, 0), (0xD800, 0xDFFF))):
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    return (*result, (start, MAX_CODEPOINT)) if start <= MAX_CODEPOINT else tuple(result)


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """Code points in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in left for c, d in right)
    return union((low, high) for low, high in pairs if low <= high)


def literal(text: str) -> Node:
    """Exactly ``text``."""
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def all_but(texts: Iterable[str]) -> Node:
    """Every string but ``texts``."""
    following: dict[str, list[str]] = {}
    options: list[Node] = [EMPTY]
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
        else:
            options = []
    options.append(Seq((Chars(complement((ord(char), ord(char)) for char in following)), Repeat(ANY, 0, None))))
    options += [Seq((literal(char), all_but(tails))) for char, tails in following.items()]
    return Alt(tuple(options))


ANY = Chars(complement(()))
ANY_BUT_NEWLINE = Chars(complement(((0x0A, 0x0A),)))
DIGIT: Ranges = ((0x30, 0x39),)
WORD = union(DIGIT, ((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
NOT_ASCII: Ranges = ((0x80, MAX_CODEPOINT),)
LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
ECMA_SPACE = union(
    SPACE,
    ((0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F)),
    ((0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
UNICODE_SPACE = union(ECMA_SPACE, ((0x1C, 0x1F), (0x85, 0x85)))
ANY_BUT_LINE_ENDS = Chars(complement(LINE_ENDS))
SHORTHANDS = {"d": (DIGIT, union(DIGIT, NOT_ASCII)), "w": (WORD, union(WORD, NOT_ASCII)), "s": (SPACE, UNICODE_SPACE)}
"""What a shorthand surely matches and what it may match by Unicode's tables or by ECMA-262."""
CONTROLS = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
SPECIAL = frozenset("\\^$.|?*+()[]{}-/")
"""What is printed with a backslash: all that means something somewhere in a pattern or class."""
REFUSED_GROUPS = {
    "?=": "look-ahead",
    "?!": "look-ahead",
    "?<=": "look-behind",
    "?<!": "look-behind",
    "?P=": "a back-reference",
    "?>": "an atomic group",
    "?#": "a comment group",
    "?(": "a conditional group",
}


def parse_regex(pattern: str, *, ascii_only: bool = True) -> Node:
    """Parse ``pattern`` into a tree; anchors stay in it.

    With ``ascii_only``, ``\\d \\w \\s`` and their complements are ASCII. Without it the pattern is one of JSON Schema:
    the tree matches a subset of what ECMA-262 does, and of what ``re`` does with Unicode's tables. Raises RegexError.
    """
    parser = _Parser(pattern, ascii_only)
    tree = parser.alternatives()
    if parser.position < len(pattern):
        parser.fail("unbalanced ')'")
    return tree


class _Parser:
    """Recursive descent over one pattern; ``position`` is the next character."""

    def __init__(self, pattern: str, ascii_only: bool) -> None:
        self.pattern = pattern
        self.ascii_only = ascii_only
        self.position = 0

    def fail(self, what: str) -> None:
        raise RegexError(f"{what} at position {self.position} of the pattern {self.pattern!r}")

    def peek(self, length: int = 1) -> str:
        return self.pattern[self.position : self.position + length]

    def take(self) -> str:
        if not self.peek():
            self.fail("the pattern ends too early")
        self.position += 1
        return self.pattern[self.position - 1]

    def alternatives(self) -> Node:
        options = [self.sequence()]
        while self.peek() == "|":
            self.take()
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Node:
        items: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            items.append(self.quantified())
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def quantified(self) -> Node:
        item = self.atom()
        bounds = self.quantifier()
        if bounds is None:
            return item
        if isinstance(item, Anchor):
            self.fail("a repeated anchor")
        if self.peek() == "?":  # lazy: the same language
            self.take()
        elif self.peek() == "+":
            self.fail("a possessive quantifier, which the grammar engine lacks,")
        if self.quantifier() is not None:
            self.fail("multiple repeat")
        return Repeat(item, *bounds)

    def quantifier(self) -> tuple[int, int | None] | None:
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if self.peek() in simple:
            return simple[self.take()]
        found = re.compile(r"\{([0-9]+)(,([0-9]*))?\}").match(self.pattern, self.position)
        if found is None:
            return None
        low = int(found[1])
        high = low if found[2] is None else int(found[3]) if found[3] else None
        if max(low, high or 0) > MAX_REPEAT:
            self.fail(f"a repetition above the limit of {MAX_REPEAT}")
        if high is not None and high < low:
            self.fail("a repetition with its bounds swapped")
        self.position = found.end()
        return low, high

    def atom(self) -> Node:
        char = self.take()
        if char == "(":
            return self.group()
        if char == "[":
            return self.char_class()
        if char == ".":
            return ANY_BUT_NEWLINE if self.ascii_only else ANY_BUT_LINE_ENDS
        if char in "^$":
            return Anchor(char == "^")
        if char == "\\":
            return Chars(self.escape(negated=False))
        if char in "*+?":
            self.fail("nothing to repeat")
        return Chars(((ord(char), ord(char)),))

    def group(self) -> Node:
        for opening, name in REFUSED_GROUPS.items():
            if self.peek(len(opening)) == opening:
                self.fail(f"{name}, which the grammar engine lacks,")
        if self.peek() == "?":
            named = re.compile(r"\?(:|P?<[A-Za-z_]\w*>)").match(self.pattern, self.position)
            if named is None:
                self.fail("an inline flag such as (?i), which the grammar engine lacks,")
            else:
                self.position = named.end()
        inner = self.alternatives()
        if self.peek() != ")":
            self.fail("missing ')'")
        self.take()
        return inner

    def char_class(self) -> Node:
        negated = self.peek() == "^"
        if negated:
            self.take()
        ranges: list[Ranges] = []
        while self.peek() != "]" or not ranges:
            if not ranges and self.peek() == "]":
                self.fail("an empty class, or a ']' to be escaped,")
            if self.peek(2) in ("[:", "&&", "--", "||", "~~"):
                self.fail(f"the class operator {self.peek(2)!r}, which engines read differently,")
            low = self.class_item(negated)
            if self.peek() == "-" and self.peek(2) != "-]":
                self.take()
                high = self.class_item(negated)
                if not (_is_single(low) and _is_single(high)) or low[0][0] > high[0][0]:
                    self.fail("a bad range in a class")
                low = ((low[0][0], high[0][0]),)
            ranges.append(low)
        self.take()
        members = union(*ranges)
        return Chars(complement(members) if negated else members)

    def class_item(self, negated: bool) -> Ranges:
        char = self.take()
        if char == "\\":
            return self.escape(negated=negated, in_class=True)
        return ((ord(char), ord(char)),)

    def escape(self, *, negated: bool, in_class: bool = False) -> Ranges:
        char = self.take()
        if char.lower() in SHORTHANDS:
            surely, maybe = SHORTHANDS[char.lower()]
            if self.ascii_only:
                return complement(surely) if char.isupper() else surely
            if char.isupper():
                return complement(surely if negated else maybe)
            return maybe if negated else surely
        if char in CONTROLS:
            return ((CONTROLS[char], CONTROLS[char]),)
        if char in "xu":
            digits = self.peek(2 if char == "x" else 4)
            if not re.fullmatch(r"[0-9A-Fa-f]{2}|[0-9A-Fa-f]{4}", digits) or len(digits) != (2 if char == "x" else 4):
                self.fail(f"a malformed \\{char} escape")
            self.position += len(digits)
            return ((int(digits, 16), int(digits, 16)),)
        if char in "bB" and not in_class:
            self.fail("a word boundary, which the grammar engine lacks,")
        if char.isalnum():
            self.fail("a back-reference" if char.isdigit() and char != "0" else f"the escape \\{char}")
        return ((ord(char), ord(char)),)


def whole(tree: Node, *, search: bool = False) -> Node:
    """Turn anchors into the language of whole strings: with ``search``, an edge without anchor may have text beyond it.

    Raises RegexError where an anchor is not at an edge.
    """
    if isinstance(tree, Alt):
        return Alt(tuple(whole(option, search=search) for option in tree.options))
    items = tree.items if isinstance(tree, Seq) else (tree,)
    if len(items) == 1 and isinstance(items[0], Alt):
        return whole(items[0], search=search)
    starts = bool(items) and items[0] == Anchor(True)
    ends = bool(items) and items[-1] == Anchor(False)
    inner = items[starts : len(items) - ends]
    if any(_has_anchor(item) for item in inner):
        raise RegexError("^ and $ are understood only at the two ends of an alternative")
    beyond = (Repeat(ANY, 0, None),) if search else ()
    return Seq((*(() if starts else beyond), *inner, *(() if ends else beyond)))


def restrict(tree: Node, allowed: Ranges) -> Node:
    """Keep the strings of ``tree`` that consist of ``allowed`` characters; NOTHING if there is none."""
    if isinstance(tree, Chars):
        left = intersection(tree.ranges, allowed)
        return Chars(left) if left else NOTHING
    if isinstance(tree, Alt):
        options = [option for o in tree.options if (option := restrict(o, allowed)) != NOTHING]
        return options[0] if len(options) == 1 else Alt(tuple(options))
    if isinstance(tree, Seq):
        items = tuple(restrict(item, allowed) for item in tree.items)
        return NOTHING if NOTHING in items else Seq(items)
    if isinstance(tree, Repeat):
        item = restrict(tree.item, allowed)
        if item == NOTHING:
            return EMPTY if tree.low == 0 else NOTHING
        return Repeat(item, tree.low, tree.high)
    return tree


@lru_cache(maxsize=256)
def lengths(tree: Node) -> tuple[int, int | None]:
    """Fewest and most characters (None: unbounded) of a string that ``tree`` matches."""
    return _lengths(tree)


def _lengths(tree: Node) -> tuple[int, int | None]:
    if isinstance(tree, Chars):
        return 1, 1
    if isinstance(tree, Repeat):
        low, high = _lengths(tree.item)
        if high == 0 or tree.high == 0:
            return 0, 0
        return low * tree.low, None if high is None or tree.high is None else high * tree.high
    parts = [_lengths(part) for part in _parts(tree)]
    if not parts:
        return 0, 0
    highs = [high for _, high in parts if high is not None]
    is_bounded = len(highs) == len(parts)
    if isinstance(tree, Alt):
        return min(low for low, _ in parts), max(highs) if is_bounded else None
    return sum(low for low, _ in parts), sum(highs) if is_bounded else None


@lru_cache(maxsize=256)
def print_regex(tree: Node) -> str:
    """Print a tree without anchors in the syntax that ``re`` and the grammar engines share."""
    return _print(tree)


def _print(tree: Node) -> str:
    if isinstance(tree, Chars):
        return _print_chars(tree.ranges)
    if isinstance(tree, Repeat):
        is_char = isinstance(tree.item, Chars)
        high = "" if tree.high is None else tree.high
        short: dict[tuple[int, int | None], str] = {(0, None): "*", (1, None): "+"}
        if is_char:
            short[0, 1] = "?"  # behind a group xgrammar 0.2.9 reads it wrong: "1" would match (a[0-9]+)?
        bounds = short.get((tree.low, tree.high)) or (
            f"{{{tree.low}}}" if tree.low == high else f"{{{tree.low},{high}}}"
        )
        inner = _print(tree.item)
        return (inner if is_char else f"({inner})") + bounds
    if isinstance(tree, Alt):
        return "(" + "|".join(_print(option) for option in tree.options) + ")"
    return "".join(_print(part) for part in _parts(tree))


def _parts(tree: Node) -> tuple[Node, ...]:
    return tree.items if isinstance(tree, Seq) else tree.options if isinstance(tree, Alt) else ()


def _has_anchor(tree: Node) -> bool:
    if isinstance(tree, Repeat):
        return _has_anchor(tree.item)
    return isinstance(tree, Anchor) or any(_has_anchor(part) for part in _parts(tree))


def _is_single(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _print_chars(ranges: Ranges) -> str:
    if _is_single(ranges):
        return _print_char(ranges[0][0])
    if ranges[-1][1] == MAX_CODEPOINT:
        return f"[^{_print_ranges(union(complement(ranges), ((0, 0),)))}]"  # NUL is in no set that ends so high
    return f"[{_print_ranges(ranges)}]"


def _print_ranges(ranges: Ranges) -> str:
    return "".join(_print_char(a) if a == b else f"{_print_char(a)}-{_print_char(b)}" for a, b in ranges)


def _print_char(codepoint: int) -> str:
    for name, value in CONTROLS.items():
        if value == codepoint:
            return "\\" + name
    if codepoint < 0x20 or codepoint == 0x7F:
        return f"\\u{codepoint:04x}"  # the engine reads \\x greedily
    char = chr(codepoint)
    return "\\" + char if char in SPECIAL else char
