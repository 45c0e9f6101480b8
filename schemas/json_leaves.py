"""Normal-form nodes of strings, numbers and enums for ``json_grammar``: what of their keywords the engine keeps.

Each rule is a measurement of xgrammar 0.2.9, repeated by the tests. Knows no objects and no arrays.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Protocol

from schemas.json_schema import APPLICATORS, ASSERTIONS, JsonSchema, Sub
from schemas.regex import (
    NOTHING,
    Chars,
    Node,
    RegexError,
    Repeat,
    Seq,
    complement,
    lengths,
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
"""Characters that a JSON string holds unescaped: patterns are generated from these only."""
MAX_INT = 2**63 - 1
MAX_EXACT_INT = 2**53
MAX_MODULUS = 1024  # the engine unrolls a modulus into as many states
MAX_MULTIPLES = 1_000
MAX_LENGTH = 100_000
MAX_DECIMALS = 6  # the engine's ranges of numbers know no more
MIN_WIDTH = Decimal("0.00001")

_DATE = (
    r"([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})-"
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "email": r"^[A-Za-z0-9._%+\-]{1,64}@[A-Za-z0-9]+([.\-][A-Za-z0-9]+)*\.[A-Za-z]{2,}$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "ipv4": rf"^{_BYTE}\.{_BYTE}\.{_BYTE}\.{_BYTE}$",
}
"""Patterns that match only what the format's check accepts (29 February and some exotic spellings are left out)."""
ENGINE_FORMATS = ("uri", "ipv6", "duration")
"""Formats that the engine narrows by itself, not exactly, and never with characters that break the JSON."""


class Notes(Protocol):
    """Where decisions go: the compiler."""

    document: JsonSchema

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

    def __init__(self, document: JsonSchema) -> None:
        self._document = document
        self._validators: dict[int, Any] = {}

    def fitting(self, flat: Sequence[Sub]) -> tuple[list[Any], bool]:
        """The values that fit and that the engine can write exactly, and whether it cannot write some."""
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
        printable = [value for value in fitting if _is_printable(value)]
        return printable, len(printable) < len(fitting)

    def _validator(self, sub: Sub) -> Any:
        if id(sub.schema) not in self._validators:
            self._validators[id(sub.schema)] = self._document.validator_at(sub)
        return self._validators[id(sub.schema)]


def _is_printable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_printable(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_printable(item) for item in value)
    if isinstance(value, float):
        return float(f"{value:.15g}") == value and (value == 0 or 1e-300 < abs(value) < 1e300)
    return not isinstance(value, int) or abs(value) <= MAX_EXACT_INT


# --- strings ----------------------------------------------------------------------------------------------------


def string_node(flat: Sequence[Sub], notes: Notes) -> dict[str, Any] | None:
    """A string: one pattern, or one format, or lengths; the engine keeps no two of them together."""
    low = max([0, *(int(sub.schema["minLength"]) for sub in flat if sub.has("minLength"))])
    highs = [int(sub.schema["maxLength"]) for sub in flat if sub.has("maxLength")]
    high = min(highs) if highs else None
    if high is not None and high < low:
        return None
    kept_sub, kept_keyword, tree = _pick_pattern(flat, notes)
    for sub in flat:
        for keyword in ("pattern", "format"):
            if sub.has(keyword) and (sub is not kept_sub or keyword != kept_keyword):
                _note_other(sub, keyword, notes)
    if tree is not None and kept_sub is not None and kept_keyword is not None:
        notes.kept((kept_sub,), kept_keyword)
        return _pattern_node(tree, low, high, flat, notes)
    engine_format = next((f for sub in flat if (f := sub.get("format")) in ENGINE_FORMATS), None)
    if engine_format and not low and high is None:
        return {"type": "string", "format": engine_format}
    node: dict[str, Any] = {"type": "string"}
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
    for keyword in ("pattern", "format"):
        for sub in flat:
            if not sub.has(keyword):
                continue
            pattern = sub.schema[keyword] if keyword == "pattern" else _format_pattern(sub, notes)
            if pattern is None:
                continue
            tree = pattern_language(pattern)
            if isinstance(tree, str):
                notes.checked((sub,), keyword, tree)
            else:
                return sub, keyword, tree
    return None, None, None


def _format_pattern(sub: Sub, notes: Notes) -> str | None:
    name = sub.schema["format"]
    return FORMAT_PATTERNS.get(name) if name in notes.document.draft.FORMAT_CHECKER.checkers else None


def pattern_language(pattern: str) -> Node | str:
    """The tree of what the pattern matches within plain characters, or why it cannot be kept."""
    try:
        tree = restrict(whole(parse_regex(pattern, ascii_only=False), search=True), PLAIN)
    except RegexError as error:
        return str(error)
    return "it needs characters that JSON escapes" if tree == NOTHING else tree


def _note_other(sub: Sub, keyword: str, notes: Notes) -> None:
    if keyword == "format" and sub.schema["format"] not in notes.document.draft.FORMAT_CHECKER.checkers:
        return  # an annotation: nothing checks it
    reason = "the grammar keeps one pattern a string" if keyword == "pattern" else "not expressible in the grammar"
    notes.checked((sub,), keyword, reason)


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
    notes.checked(
        [sub for sub in moduli if sub not in whole_moduli], "multipleOf", "the grammar counts whole numbers only"
    )
    if is_integer or whole_moduli:
        modulus = math.lcm(*(int(sub.schema["multipleOf"]) for sub in whole_moduli))
        lowest = None if low is None else math.floor(low) + 1 if low_open else math.ceil(low)
        highest = None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
        return _integer_node((lowest, highest), modulus, flat, notes)
    return _fraction_node((low, low_open), (high, high_open), flat, notes)


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
    if (low or 0) > MAX_INT or (high or 0) < -MAX_INT:
        for keyword in (*BOUNDS, "multipleOf"):
            notes.checked(flat, keyword, "beyond the grammar's 64-bit integers")
        return {"type": "integer"}
    low = None if low is None else max(low, -MAX_INT)
    high = None if high is None else min(high, MAX_INT)
    if modulus > 1 and low is not None and high is not None:
        multiples = range(-(-low // modulus) * modulus, high + 1, modulus)
        if len(multiples) <= MAX_MULTIPLES and max(abs(low), abs(high)) <= MAX_EXACT_INT:
            notes.kept(flat, *BOUNDS, "multipleOf")
            return {"enum": list(multiples)} if multiples else None
    node: dict[str, Any] = {"type": "integer"}
    if modulus > 1 and (modulus > MAX_MODULUS or low is not None or high is not None):
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
    lower: tuple[Decimal | None, bool], upper: tuple[Decimal | None, bool], flat: Sequence[Sub], notes: Notes
) -> dict[str, Any]:
    (low, low_open), (high, high_open) = lower, upper
    node: dict[str, Any] = {"type": "number"}
    is_narrow = low is not None and high is not None and high - low < MIN_WIDTH
    if is_narrow or not _is_simple(low) or not _is_simple(high):
        for keyword in BOUNDS:
            notes.checked(flat, keyword, f"the grammar's bounds have at most {MAX_DECIMALS} decimals and 15 digits")
        return node
    if low is not None:
        node["exclusiveMinimum" if low_open else "minimum"] = _as_number(low)
    if high is not None:
        node["exclusiveMaximum" if high_open else "maximum"] = _as_number(high)
    notes.kept(flat, *BOUNDS)
    return node


def _is_simple(bound: Decimal | None) -> bool:
    if bound is None:
        return True
    return abs(bound) < 10**9 and bound == round(bound, MAX_DECIMALS)


def _as_number(bound: Decimal) -> int | float:
    return int(bound) if bound == bound.to_integral_value() else float(bound)
