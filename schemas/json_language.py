"""The documents that a grammar engine writes for a schema in the normal form, as a language.

Mirrors both engines: keys in schema order, ``", "`` and ``": "`` between. Where an engine knows more spellings than the
other, both are here; the shortest way to an end uses none of them. Knows no schema as users write it.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from schemas.completion import shared
from schemas.json_leaves import ESCAPABLE, MAX_DECIMALS, PLAIN
from schemas.json_nodes import PREFIX, Node
from schemas.language import Chars, Either, Join, Language, Many, Rule, Tree, from_regex, optional
from schemas.numeral import Bounds, Numeral
from schemas.plan import GrammarEngine
from schemas.regex import DIGIT, Ranges, intersection, parse_regex, whole

ANY = "any"
MAX_INTEGERS = 101
"""Bounded integers, such as a grade from 1 to 5, are labels up to that many: 0 to 100 are."""
ESCAPES = {ord(char): json.dumps(char)[1:-1] for char in '"\\\b\f\n\r\t'}
HEX: Ranges = ((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
NON_ZERO: Ranges = ((0x31, 0x39),)


def json_language(source: str, engine: GrammarEngine) -> Language:
    """The language of a schema that ``json_grammar`` compiled for an engine."""
    node = json.loads(source)
    writer = _Writer(engine)
    writer.rules[ANY] = writer.anything()
    for name, definition in node.pop("$defs", {}).items():
        writer.rules[PREFIX + name] = writer.value(definition)
    root = writer.value(node)
    return Language(root, writer.rules)


def written(value: Any, engine: GrammarEngine) -> str:
    """A value of an enum as an engine writes it: both shorten floats, xgrammar writes containers without blanks."""
    is_dense = engine is GrammarEngine.XGRAMMAR
    comma, colon = (",", ":") if is_dense else (", ", ": ")
    if isinstance(value, dict):
        pairs = (f"{written(key, engine)}{colon}{written(item, engine)}" for key, item in value.items())
        return "{" + comma.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + comma.join(written(item, engine) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:.15g}"
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f") if is_dense else text


class _Writer:
    """Builds the rules, those that others use first where that is possible."""

    def __init__(self, engine: GrammarEngine) -> None:
        self.engine = engine
        self.rules: dict[str, Tree] = {}
        self.char = _CHARS[engine]
        self.key = _quoted(Many(self.char, 0, None))

    def rule(self, tree: Tree) -> Tree:
        """Give a tree a name, which keeps trees shallow."""
        name = f"part {len(self.rules)}"
        self.rules[name] = tree
        return Rule(name)

    def anything(self) -> Tree:
        array = _bracketed("[", _listed(Rule(ANY), 0, None), "]")
        member = Join((self.key, ": ", Rule(ANY)))
        return Either(
            (_NUMBER, self.key, "true", "false", "null", array, _bracketed("{", _listed(member, 0, None), "}"))
        )

    def value(self, node: Node | bool) -> Tree:
        if node is True or node == {}:
            return Rule(ANY)
        assert isinstance(node, dict), "False stands in no value's place"
        if "$ref" in node:
            return Rule(node["$ref"])
        if "anyOf" in node:
            return Either(tuple(self.value(option) for option in node["anyOf"]))
        if "enum" in node:
            return Either(tuple(self.literal(value) for value in node["enum"]))
        makers: dict[str, Callable[[Node], Tree]] = {
            **{"object": self.object, "array": self.array, "string": self.string},
            **{"integer": self.number, "number": self.number},
            **{"boolean": lambda _: Either(("true", "false")), "null": lambda _: "null"},
        }
        return makers[node["type"]](node)

    def literal(self, value: Any) -> str:
        return written(value, self.engine)

    def number(self, node: Node) -> Tree:
        limits = {key: Fraction(str(node[key])) for key in node if key != "type"}
        is_integer, is_exact = node["type"] == "integer", self.engine is GrammarEngine.LLGUIDANCE
        if not limits:
            return _NUMBER if not is_integer else _INTEGER_OR_MINUS_ZERO if is_exact else _INTEGER
        low = limits.get("exclusiveMinimum", limits.get("minimum"))
        high = limits.get("exclusiveMaximum", limits.get("maximum"))
        modulus = limits.get("multipleOf")
        bounds = Bounds(
            low=low,
            high=high,
            is_low_open="exclusiveMinimum" in limits,
            is_high_open="exclusiveMaximum" in limits,
            modulus=modulus,
        )
        is_one_sided = (low is None) != (high is None)
        if is_integer:
            has_minus_zero = is_exact and not is_one_sided
            if limits.keys() == {"minimum", "maximum"} and node["maximum"] - node["minimum"] < MAX_INTEGERS:
                return _listed_integers(node["minimum"], node["maximum"], has_minus_zero=has_minus_zero)
            return Numeral(replace(bounds, minus_zero_decimals=0 if has_minus_zero else None))
        if not is_exact:
            return Numeral(replace(bounds, max_decimals=MAX_DECIMALS, minus_zero_decimals=1))
        if modulus is None:
            return Numeral(replace(bounds, max_decimals=None))
        num_decimals = -int(Decimal(str(node["multipleOf"])).normalize().as_tuple().exponent)  # all of them, or none
        is_free = low is None and high is None
        return Numeral(
            replace(
                bounds,
                min_decimals=num_decimals,
                max_decimals=num_decimals,
                minus_zero_decimals=0 if is_free else None,
            )
        )

    def string(self, node: Node) -> Tree:
        patterns = [node["pattern"]] if "pattern" in node else [part["pattern"] for part in node.get("allOf", ())]
        bodies = [_pattern(pattern) for pattern in patterns]
        low, high = node.get("minLength", 0), node.get("maxLength")
        if low or high is not None or not bodies:
            is_counted = low > 0 or high is not None
            is_plain = is_counted and self.engine is GrammarEngine.XGRAMMAR  # which counts no escapes
            bodies.append(Many(Chars(PLAIN) if is_plain else self.char, low, high))
        return _quoted(bodies[0] if len(bodies) == 1 else shared(bodies))

    def array(self, node: Node) -> Tree:
        low, high = node.get("minItems", 0), node.get("maxItems")
        prefix = [self.value(item) for item in node.get("prefixItems", ())]
        if node["items"] is False:
            tail: Tree = ""
        elif not prefix:
            return _bracketed("[", _listed(self.value(node["items"]), low, high), "]")
        else:
            more = Join((", ", self.value(node["items"])))
            tail = Many(more, max(0, low - len(prefix)), None if high is None else high - len(prefix))
        for index in reversed(range(len(prefix))):
            tail = self.rule(Join((", " if index else "", prefix[index], tail)))
            if index >= low:
                tail = optional(tail)
        return _bracketed("[", tail, "]")

    def object(self, node: Node) -> Tree:
        """Known keys in order, then others. How many were written is counted where it matters, else if any was."""
        properties = [(name, value) for name, value in node["properties"].items() if value is not False]
        required = set(node.get("required", ()))
        low, high = node.get("minProperties", 0), node.get("maxProperties")
        other = self.other_member(node)
        most = max(1, low) if high is None else max(low, high)  # counting further tells nothing

        tails = [self.other_members(other, count, low, high) for count in range(most + 1)]
        for index in reversed(range(len(properties))):
            name, value = properties[index]
            member = Join((self.literal(name), ": ", self.value(value)))
            following = []
            for count in range(min(most, index) + 1):
                is_full = high is not None and count >= high
                written = None if is_full else Join((", " if count else "", member, tails[min(count + 1, most)]))
                options = [
                    option for option in (written, None if name in required else tails[count]) if option is not None
                ]
                following.append(self.rule(options[0] if len(options) == 1 else Either(tuple(options))))
            tails = [*following, *following[-1:] * (most + 1 - len(following))]
        return _bracketed("{", tails[0], "}")

    def other_member(self, node: Node) -> Tree | None:
        """A key that no property names, and its value."""
        names = Either(tuple(_literal_body(name) for name in node["properties"]))
        patterns = {pattern: _pattern(pattern) for pattern in node.get("patternProperties", {})}
        options = [
            Join((_quoted(self.key_body([patterns[pattern]], [names])), ": ", self.value(value)))
            for pattern, value in node.get("patternProperties", {}).items()
            if value is not False
        ]
        if (others := node["additionalProperties"]) is not False:
            naming = node.get("propertyNames", {})
            body = _pattern(naming["pattern"]) if "pattern" in naming else Many(self.char, 0, None)
            options.append(
                Join((_quoted(self.key_body([body], [names, *patterns.values()])), ": ", self.value(others)))
            )
        return Either(tuple(options)) if options else None

    def key_body(self, included: list[Tree], excluded: list[Tree]) -> Tree:
        excluded = [tree for tree in excluded if not isinstance(tree, Either) or tree.options]
        return shared(included, excluded) if excluded else included[0]

    def other_members(self, other: Tree | None, count: int, low: int, high: int | None) -> Tree:
        """The keys after ``count`` known ones."""
        missing = max(0, low - count)
        if other is None:
            return Either(()) if missing else ""
        room = None if high is None else max(0, high - count)
        if count:
            return self.rule(Many(Join((", ", other)), missing, room))
        return self.rule(_listed(other, missing, room))


def _bracketed(opening: str, inner: Tree, closing: str) -> Tree:
    return Join((opening, inner, closing))


def _listed(item: Tree, low: int, high: int | None) -> Tree:
    """``low`` to ``high`` items with commas between."""
    if high == 0:
        return ""
    items = Join((item, Many(Join((", ", item)), max(0, low - 1), None if high is None else high - 1)))
    return items if low else optional(items)


def _listed_integers(low: int, high: int, *, has_minus_zero: bool) -> Tree:
    found = [str(number) for number in range(low, high + 1)]
    return Either((*found, "-0") if has_minus_zero and low <= 0 <= high else tuple(found))


def _quoted(body: Tree) -> Tree:
    return Join(('"', body, '"'))


def _literal_body(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _pattern(pattern: str) -> Tree:
    """The bodies of the strings that a printed pattern matches."""
    return from_regex(whole(parse_regex(pattern, ascii_only=False)), _written)


def _written(ranges: Ranges) -> Tree:
    """A character as a string's body holds it."""
    escaped = [escape for code, escape in ESCAPES.items() if any(low <= code <= high for low, high in ranges)]
    plain = intersection(ranges, PLAIN)
    options: Iterable[Tree] = (*([Chars(plain)] if plain else []), *escaped)
    return Either(tuple(options))


def _hex(*ranges: Ranges) -> Tree:
    return Join(tuple(map(Chars, ranges)))


_SURROGATES = Join(
    (Chars(((0x44, 0x44), (0x64, 0x64))), _hex(((0x38, 0x39), (0x41, 0x42), (0x61, 0x62)), HEX, HEX), "\\u")
)
_LOW_SURROGATE = Join((Chars(((0x44, 0x44), (0x64, 0x64))), _hex(((0x43, 0x46), (0x63, 0x66)), HEX, HEX)))
_CODE = Either(
    (
        _hex(((0x30, 0x39), (0x41, 0x43), (0x45, 0x46), (0x61, 0x63), (0x65, 0x66)), HEX, HEX, HEX),
        Join((Chars(((0x44, 0x44), (0x64, 0x64))), _hex(((0x30, 0x37),), HEX, HEX))),
        Join((_SURROGATES, _LOW_SURROGATE)),
    )
)
_CHARS = {
    GrammarEngine.XGRAMMAR: Either((Chars(PLAIN), Join(("\\", Either((*'"\\/bfnrt', Join(("u", _CODE)))))))),
    GrammarEngine.LLGUIDANCE: Either((Chars(intersection(PLAIN, ESCAPABLE)), Join(("\\", Either(tuple('"\\bfnrt')))))),
}
"""A character of a string that nothing limits, in all its spellings."""
_DIGITS = Many(Chars(DIGIT), 1, None)
_POSITIVE = Join((Chars(NON_ZERO), Many(Chars(DIGIT), 0, None)))
_INTEGER = Either(("0", Join((optional("-"), _POSITIVE))))
_INTEGER_OR_MINUS_ZERO = Join((optional("-"), Either(("0", _POSITIVE))))
_EXPONENT = Join((Chars(((0x45, 0x45), (0x65, 0x65))), optional(Chars(((0x2B, 0x2B), (0x2D, 0x2D)))), _DIGITS))
_NUMBER = Join((_INTEGER_OR_MINUS_ZERO, optional(Join((".", _DIGITS))), optional(_EXPONENT)))
