"""Normal-form nodes of strings, numbers and enums for ``json_grammar``: what of their keywords an engine keeps.

Each rule is a measurement of xgrammar 0.2.9 or llguidance 1.9.1, repeated by the tests. Knows no objects and no arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from functools import lru_cache
from typing import Any, Protocol

from schemas.automaton import Automaton
from schemas.json_formats import BASE64_PATTERN, FORMAT_PATTERNS
from schemas.json_schema import APPLICATORS, ASSERTIONS, JsonSchema, Sub
from schemas.plan import GrammarEngine
from schemas.regex import (
    NOTHING,
    Chars,
    Node,
    Ranges,
    RegexError,
    Repeat,
    Seq,
    complement,
    lengths,
    literal,
    parse_regex,
    print_regex,
    restrict,
    whole,
)

ATOMS = frozenset(("null", "boolean", "object", "array", "string", "integer", "fraction"))
JSON_TYPES = {
    **{name: frozenset((name,)) for name in ATOMS - {"fraction"}},
    "number": frozenset(("integer", "fraction")),
    "any": ATOMS,
}
"""What a type name stands for; numbers are cut in two so that types can be intersected."""

PLAIN = complement(((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)))
"""Characters that a JSON string holds unescaped: xgrammar generates patterns from these only."""
ESCAPABLE = complement(((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F)))
"""What llguidance writes: characters without escape and those with a short one."""
PATTERN_KEYWORDS = ("pattern", "format", "contentEncoding")
MAX_INT = 2**63 - 1
MAX_EXACT_INT = 2**53
MAX_MODULUS = 1024  # the engine unrolls a modulus into as many states
MAX_MULTIPLES = 1_000
MAX_LENGTH = 100_000
MAX_JOINED_LENGTH = 16
"""Largest minLength beside a pattern: llguidance was seen to give up on short patterns from 24 on."""
MAX_DECIMALS = 6  # the engine's ranges of numbers know no more
MIN_WIDTH = Decimal("0.00001")
MIN_MODULUS = Decimal("0.00000001")


class Notes(Protocol):
    """Where decisions go: the compiler."""

    document: JsonSchema
    engine: GrammarEngine

    def narrowed(self) -> None: ...

    def kept(self, subs: Sequence[Sub], *keywords: str) -> None: ...

    def checked(self, subs: Sequence[Sub], keyword: str, reason: str) -> None: ...


def types_of(flat: Sequence[Sub]) -> frozenset[str]:
    """The atoms that every ``type`` keyword of a conjunction allows."""
    types = ATOMS
    for sub in flat:
        if sub.has("type"):
            names = sub.schema["type"] if isinstance(sub.schema["type"], list) else [sub.schema["type"]]
            types &= frozenset(atom for name in names for atom in JSON_TYPES[name])
    return types


class EnumValues:
    """Picks the values of an enum that a whole conjunction accepts; keeps the validators it needed."""

    def __init__(self, document: JsonSchema, engine: GrammarEngine) -> None:
        self._document = document
        self._is_printable = _is_printable if engine is GrammarEngine.XGRAMMAR else _is_plain
        self._validators: dict[int, Any] = {}

    def fitting(self, flat: Sequence[Sub]) -> tuple[list[Any], list[Any]]:
        """The values that fit: those that the engine can write exactly, and those that it cannot."""
        has_const = "const" in self._document.draft.VALIDATORS
        for sub in flat:
            if has_const and sub.has("const"):
                source, keyword, values = sub, "const", [sub.schema["const"]]
                break
            if sub.has("enum"):
                source, keyword, values = sub, "enum", sub.schema["enum"]
        others = [self._validator(sub) for sub in flat if sub is not source]
        rest = {key: value for key, value in source.schema.items() if key != keyword}
        if rest.keys() & (ASSERTIONS | APPLICATORS):
            others.append(self._document.validator_at(replace(source, schema=rest)))
        fitting = [value for value in values if all(validator.is_valid(value) for validator in others)]
        printable = [value for value in fitting if self._is_printable(value)]
        return printable, [value for value in fitting if not self._is_printable(value)]

    def _validator(self, sub: Sub) -> Any:
        if id(sub.schema) not in self._validators:
            self._validators[id(sub.schema)] = self._document.validator_at(sub)
        return self._validators[id(sub.schema)]


def _is_printable(value: Any) -> bool:
    """Whether xgrammar writes the value as a number that reads back the same."""
    if isinstance(value, dict):
        return all(_is_printable(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_printable(item) for item in value)
    if isinstance(value, float):
        return float(f"{value:.15g}") == value and (value == 0 or 1e-300 < abs(value) < 1e300)
    return not isinstance(value, int) or abs(value) <= MAX_INT


def _is_plain(value: Any) -> bool:
    """Whether llguidance writes the value as json.dumps does."""
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, str):
        return restrict(literal(value), ESCAPABLE) != NOTHING
    if isinstance(value, float):
        return "e" not in repr(value) and _is_printable(value)
    return not isinstance(value, int) or abs(value) <= MAX_EXACT_INT


# --- strings ----------------------------------------------------------------------------------------------------


def string_node(flat: Sequence[Sub], notes: Notes) -> dict[str, Any] | None:
    """A string; xgrammar keeps one pattern, or one format, or lengths, and no two of them together."""
    low = max([0, *(int(sub.schema["minLength"]) for sub in flat if sub.has("minLength"))])
    highs = [int(sub.schema["maxLength"]) for sub in flat if sub.has("maxLength")]
    high = min(highs) if highs else None
    if high is not None and high < low:
        return None
    if "contentMediaType" in notes.document.draft.VALIDATORS:
        holders = [sub for sub in flat if sub.get("contentMediaType") == "application/json"]
        notes.checked(holders, "contentMediaType", "the grammar does not look into a string")
    if notes.engine is GrammarEngine.LLGUIDANCE:
        return _joined_string(flat, low, high, notes)
    kept_sub, kept_keyword, tree = _pick_pattern(flat, notes)
    for sub in flat:
        for keyword in PATTERN_KEYWORDS:
            if sub.has(keyword) and (sub is not kept_sub or keyword != kept_keyword):
                _note_other(sub, keyword, notes)
    if tree is not None and kept_sub is not None and kept_keyword is not None:
        notes.kept((kept_sub,), kept_keyword)
        return _pattern_node(tree, low, high, flat, notes)
    if low or (high is not None and high <= MAX_LENGTH):
        notes.narrowed()  # xgrammar counts characters without escapes only: no quotes, no line breaks
    return _with_lengths({"type": "string"}, low, high, flat, notes)


def _joined_string(flat: Sequence[Sub], low: int, high: int | None, notes: Notes) -> dict[str, Any] | None:
    """Every pattern, every format that is one, and the lengths, together."""
    trees: list[Node] = []
    for keyword in PATTERN_KEYWORDS:
        for sub in flat:
            pattern = _pattern_of(sub, keyword, notes)
            if pattern is None:
                continue
            tree = pattern_language(pattern, ESCAPABLE)
            if isinstance(tree, str):
                notes.checked((sub,), keyword, tree)
                continue
            shortest, longest = lengths(tree)
            if (high is not None and shortest > high) or (longest is not None and longest < low):
                return None
            if any(_excludes(tree, other) for other in trees):
                if keyword == "format":
                    notes.checked((sub,), keyword, "its pattern, which has the usual forms, does not fit the others")
                    continue
                return None
            notes.kept((sub,), keyword)
            if tree not in trees:
                trees.append(tree)
    low = _shorten(trees, low, flat, notes)
    node: dict[str, Any] = {"type": "string"}
    patterns = [f"^({print_regex(tree)})$" for tree in trees]
    if len(patterns) == 1:
        node["pattern"] = patterns[0]
    elif patterns:
        node["allOf"] = [{"pattern": pattern} for pattern in patterns]
    return _with_lengths(node, low, high, flat, notes)


def _shorten(trees: list[Node], low: int, flat: Sequence[Sub], notes: Notes) -> int:
    """The least length that must still be said beside the patterns, into one of which it may go.

    llguidance looks for a string that fits both, and gives up early.
    """
    if any(lengths(tree)[0] >= low for tree in trees):
        return 0
    if not trees or low <= MAX_JOINED_LENGTH:
        return low
    for index, tree in enumerate(trees):
        fitted = _fit_lengths(tree, low, None)
        others = [*trees[:index], *trees[index + 1 :]]
        if fitted is not None and lengths(fitted)[0] >= low and not any(_excludes(fitted, other) for other in others):
            trees[index] = fitted
            return 0
    notes.checked(flat, "minLength", "the grammar engine cannot find out that a string so long fits the pattern")
    return 0


def _excludes(tree: Node, other: Node) -> bool:
    """Whether surely no string matches both."""
    try:
        return not Automaton(tree).overlaps(Automaton(other))
    except RegexError:
        return False


def _with_lengths(
    node: dict[str, Any], low: int, high: int | None, flat: Sequence[Sub], notes: Notes
) -> dict[str, Any]:
    if low:
        node["minLength"] = low
    if high is not None and high > MAX_LENGTH:
        notes.checked(flat, "maxLength", f"above the limit of {MAX_LENGTH} for what the grammar counts")
    elif high is not None:
        node["maxLength"] = high
    notes.kept(flat, "minLength", "maxLength")
    return node


def _pick_pattern(flat: Sequence[Sub], notes: Notes) -> tuple[Sub | None, str | None, Node | None]:
    """The first pattern that the grammar can keep, else the first format that is one."""
    for keyword in PATTERN_KEYWORDS:
        for sub in flat:
            if not sub.has(keyword):
                continue
            pattern = _pattern_of(sub, keyword, notes)
            if pattern is None:
                continue
            tree = pattern_language(pattern)
            if isinstance(tree, str):
                notes.checked((sub,), keyword, tree)
            else:
                if tree != pattern_language(pattern, ESCAPABLE):
                    notes.narrowed()
                return sub, keyword, tree
    return None, None, None


def _pattern_of(sub: Sub, keyword: str, notes: Notes) -> str | None:
    """The pattern behind a ``pattern`` or ``format``; None if there is none, which is noted where it matters."""
    if not sub.has(keyword) or not isinstance(value := sub.schema[keyword], str):
        return None
    if keyword == "pattern":
        return value
    if keyword == "contentEncoding":
        return BASE64_PATTERN if value == "base64" and keyword in notes.document.draft.VALIDATORS else None
    if value not in notes.document.draft.FORMAT_CHECKER.checkers:
        return None  # an annotation: nothing checks it
    if value not in FORMAT_PATTERNS:
        notes.checked((sub,), keyword, "no pattern says what it allows")
    return FORMAT_PATTERNS.get(value)


@lru_cache(maxsize=256)
def pattern_language(pattern: str, allowed: Ranges = PLAIN) -> Node | str:
    """The tree of what the pattern matches within the allowed characters, or why it cannot be kept."""
    try:
        tree = restrict(whole(parse_regex(pattern, ascii_only=False), search=True), allowed)
    except RegexError as error:
        return str(error)
    return "it needs characters that JSON escapes" if tree == NOTHING else tree


def _note_other(sub: Sub, keyword: str, notes: Notes) -> None:
    if keyword == "format" and sub.schema["format"] not in notes.document.draft.FORMAT_CHECKER.checkers:
        return  # an annotation: nothing checks it
    if keyword == "contentEncoding" and _pattern_of(sub, keyword, notes) is None:
        return
    notes.checked((sub,), keyword, "the grammar keeps one pattern a string")


def _pattern_node(tree: Node, low: int, high: int | None, flat: Sequence[Sub], notes: Notes) -> dict[str, Any] | None:
    fitted = _fit_lengths(tree, low, high)
    if fitted is None:
        return None
    shortest, longest = lengths(fitted)
    if shortest < low:
        notes.checked(flat, "minLength", "the grammar cannot combine it with this pattern")
    if high is not None and (longest is None or longest > high):
        notes.checked(flat, "maxLength", "the grammar cannot combine it with this pattern")
    notes.kept(flat, "minLength", "maxLength")
    return {"type": "string", "pattern": print_regex(fitted)}


def _fit_lengths(tree: Node, low: int, high: int | None) -> Node | None:
    """Put length bounds into the one repeated class of a pattern such as ``^[a-z]+$``; None: no string is left."""
    items = _flat_items(tree)
    loose = [index for index, item in enumerate(items) if len(set(lengths(item))) > 1]
    shortest, longest = lengths(tree)
    if (high is not None and shortest > high) or (longest is not None and longest < low):
        return None
    if len(loose) != 1:
        return tree
    item = items[loose[0]]
    if not isinstance(item, Repeat) or not isinstance(item.item, Chars):
        return tree
    fixed = shortest - item.low
    new_low = max(item.low, low - fixed)
    new_high = item.high if high is None else high - fixed if item.high is None else min(item.high, high - fixed)
    return Seq((*items[: loose[0]], Repeat(item.item, new_low, new_high), *items[loose[0] + 1 :]))


def _flat_items(tree: Node) -> list[Node]:
    return [item for part in tree.items for item in _flat_items(part)] if isinstance(tree, Seq) else [tree]


# --- numbers ----------------------------------------------------------------------------------------------------


def number_node(flat: Sequence[Sub], notes: Notes, *, is_integer: bool) -> dict[str, Any] | None:
    """A number or an integer within its bounds."""
    low, low_open = _bound(flat, "minimum", "exclusiveMinimum", 1)
    high, high_open = _bound(flat, "maximum", "exclusiveMaximum", -1)
    if low is not None and high is not None and (low > high or (low == high and (low_open or high_open))):
        return None
    moduli = [sub for sub in flat if sub.has("multipleOf")]
    whole_moduli = [sub for sub in moduli if float(sub.schema["multipleOf"]).is_integer()]
    fraction = Decimal(repr(moduli[0].schema["multipleOf"])) if len(moduli) == 1 and not whole_moduli else None
    if fraction is not None and fraction >= MIN_MODULUS and notes.engine is GrammarEngine.LLGUIDANCE and not is_integer:
        return _fraction_node((low, low_open), (high, high_open), fraction, flat, notes)
    notes.checked(
        [sub for sub in moduli if sub not in whole_moduli], "multipleOf", "the grammar counts whole numbers only"
    )
    if is_integer or whole_moduli:
        modulus = math.lcm(*(int(sub.schema["multipleOf"]) for sub in whole_moduli))
        lowest = None if low is None else math.floor(low) + 1 if low_open else math.ceil(low)
        highest = None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
        return _integer_node((lowest, highest), modulus, flat, notes)
    return _fraction_node((low, low_open), (high, high_open), None, flat, notes)


def _bound(flat: Sequence[Sub], keyword: str, open_keyword: str, sign: int) -> tuple[Decimal | None, bool]:
    """The tightest bound and whether it is exclusive. ``sign`` 1: a lower bound, -1: an upper one."""
    bounds: list[tuple[Decimal, bool]] = []
    for sub in flat:
        opened = sub.get(open_keyword)
        if sub.has(keyword):
            bounds.append((Decimal(repr(sub.schema[keyword])), opened is True))  # draft 4 has a boolean
        if opened is not None and not isinstance(opened, bool):
            bounds.append((Decimal(repr(opened)), True))
    return max(bounds, key=lambda bound: (sign * bound[0], bound[1]), default=(None, False))


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _integer_node(
    bounds: tuple[int | None, int | None], modulus: int, flat: Sequence[Sub], notes: Notes
) -> dict[str, Any] | None:
    low, high = bounds
    if low is not None and high is not None and low > high:
        return None
    is_exact = notes.engine is GrammarEngine.LLGUIDANCE
    limit = MAX_EXACT_INT if is_exact else MAX_INT
    if (low or 0) > limit or (high or 0) < -limit:
        for keyword in (*BOUNDS, "multipleOf"):
            notes.checked(flat, keyword, "beyond the grammar's integers")
        return {"type": "integer"}
    low = None if low is None else max(low, -limit)
    high = None if high is None else min(high, limit)
    if modulus > 1 and low is not None and high is not None:
        multiples = range(-(-low // modulus) * modulus, high + 1, modulus)
        if len(multiples) <= MAX_MULTIPLES and max(abs(low), abs(high)) <= MAX_EXACT_INT:
            notes.kept(flat, *BOUNDS, "multipleOf")
            return {"enum": list(multiples)} if multiples else None
    node: dict[str, Any] = {"type": "integer"}
    is_too_much = modulus > 2**20 if is_exact else modulus > MAX_MODULUS or low is not None or high is not None
    if modulus > 1 and is_too_much:
        notes.checked(flat, "multipleOf", "the grammar cannot combine it with these bounds, or it is too large")
    elif modulus > 1:
        node["multipleOf"] = modulus
    if low is not None:
        node["minimum"] = low
    if high is not None:
        node["maximum"] = high
    notes.kept(flat, *BOUNDS, "multipleOf")
    return node


def _fraction_node(
    lower: tuple[Decimal | None, bool],
    upper: tuple[Decimal | None, bool],
    modulus: Decimal | None,
    flat: Sequence[Sub],
    notes: Notes,
) -> dict[str, Any]:
    (low, low_open), (high, high_open) = lower, upper
    node: dict[str, Any] = {"type": "number"}
    if modulus is not None:
        node["multipleOf"] = float(modulus)
        notes.kept(flat, "multipleOf")
    max_decimals, min_width = (MAX_DECIMALS, MIN_WIDTH) if notes.engine is GrammarEngine.XGRAMMAR else (12, 0)
    is_too_narrow = low is not None and high is not None and high - low < min_width
    if is_too_narrow or not _is_simple(low, max_decimals) or not _is_simple(high, max_decimals):
        for keyword in BOUNDS:
            notes.checked(flat, keyword, f"the grammar's bounds have at most {max_decimals} decimals and 15 digits")
        return node
    if low is not None:
        node["exclusiveMinimum" if low_open else "minimum"] = _as_number(low)
    if high is not None:
        node["exclusiveMaximum" if high_open else "maximum"] = _as_number(high)
    if len(node) > 1:
        notes.narrowed()  # xgrammar writes MAX_DECIMALS at most
    notes.kept(flat, *BOUNDS)
    return node


def _is_simple(bound: Decimal | None, max_decimals: int) -> bool:
    if bound is None:
        return True
    return abs(bound) < 10**9 and bound == round(bound, max_decimals)


def _as_number(bound: Decimal) -> int | float:
    return int(bound) if bound == bound.to_integral_value() else float(bound)
