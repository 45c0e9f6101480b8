"""The longest text that a constraint lets a model write, from the very grammar that the engine is handed.

A token is at least a byte, so a number of bytes bounds the tokens too. Knows no tokens and no engine.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from schemas.constraints import GrammarEngine, grammar_engine, grammar_source
from schemas.ebnf import ROOT, Grammar, Ref, parse_ebnf
from schemas.errors import ConstraintError
from schemas.json_leaves import ESCAPABLE, MAX_DECIMALS, PLAIN
from schemas.json_nodes import PREFIX, Node
from schemas.records import Constraint, ConstraintKind
from schemas.regex import Alt, Chars, Ranges, Repeat, Seq, complement, intersection, parse_regex, whole
from schemas.regex import Node as Tree

MAX_CHAR_BYTES = 4
SEPARATOR = len(", ")
ESCAPED = intersection(ESCAPABLE, complement(PLAIN))
"""Characters that take a backslash in a JSON string."""

Width = Callable[[Ranges], int]


@lru_cache(maxsize=256)
def max_bytes(constraint: Constraint) -> int | None:
    """Bytes of UTF-8 that no text of the constraint exceeds, in canonical form; None if there is no such bound.

    None too for a constraint that cannot be compiled.
    """
    try:
        found = _longest(constraint)
    except (ConstraintError, RecursionError):
        return None
    return None if found == math.inf else int(found)


def _longest(constraint: Constraint) -> float:
    source = grammar_source(constraint)
    if constraint.kind is ConstraintKind.JSON_SCHEMA:
        root = json.loads(source)
        return _Json(root.get("$defs", {}), grammar_engine(constraint)).longest(root)
    if constraint.kind is ConstraintKind.REGEX:
        return _longest_match(parse_regex(source), _utf8_width)
    return _longest_derivation(parse_ebnf(source), ROOT, {})


class _Json:
    """Lengths of the normal form's nodes; a named node that is being measured leads back to itself: no bound."""

    def __init__(self, defs: Mapping[str, Node], engine: GrammarEngine) -> None:
        self._defs = defs
        self._engine = engine
        self._known: dict[str, float] = {}

    def longest(self, node: Node) -> float:
        if "$ref" in node:
            return self._named(node["$ref"].removeprefix(PREFIX))
        if "anyOf" in node:
            return max(self.longest(option) for option in node["anyOf"])
        if "enum" in node:
            return max(map(_printed, node["enum"]))
        measures: dict[str, Callable[[Node], float]] = {
            "object": self._object,
            "array": self._array,
            "string": _string,
            "integer": _integer,
            "number": self._number,
            "boolean": lambda _: len("false"),
            "null": lambda _: len("null"),
        }
        return measures[node["type"]](node) if node else math.inf

    def _named(self, name: str) -> float:
        if name not in self._known:
            self._known[name] = math.inf
            self._known[name] = self.longest(self._defs[name])
        return self._known[name]

    def _object(self, node: Node) -> float:
        if node["additionalProperties"] is not False or node.get("patternProperties"):
            return math.inf
        values = {key: value for key, value in node["properties"].items() if value is not False}
        members = [_printed(key) + len(": ") + self.longest(value) for key, value in values.items()]
        return len("{}") + _joined(members)

    def _array(self, node: Node) -> float:
        items = [self.longest(item) for item in node.get("prefixItems", ())]
        if node["items"] is not False:
            num_more = node.get("maxItems", math.inf) - len(items)
            if num_more == math.inf:
                return math.inf
            items += [self.longest(node["items"])] * num_more
        return len("[]") + _joined(items)

    def _number(self, node: Node) -> float:
        low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", node.get("exclusiveMaximum"))
        if self._engine is not GrammarEngine.XGRAMMAR or low is None or high is None:
            return math.inf
        return max(len(str(math.floor(low))), len(str(math.ceil(high)))) + len(".") + MAX_DECIMALS


def _joined(lengths: list[float]) -> float:
    return sum(lengths) + SEPARATOR * max(0, len(lengths) - 1)


def _printed(value: Any) -> int:
    text = json.dumps(value, ensure_ascii=False)
    return len(text.replace("\x7f", "\\u007f").encode("utf-8", "surrogatepass"))  # xgrammar escapes it


def _string(node: Node) -> float:
    patterns = [node["pattern"]] if "pattern" in node else [part["pattern"] for part in node.get("allOf", ())]
    trees = (whole(parse_regex(pattern, ascii_only=False)) for pattern in patterns)
    limits = [_longest_match(tree, _escaped_width) for tree in trees]
    if "maxLength" in node:
        limits.append(node["maxLength"] * MAX_CHAR_BYTES)
    return len('""') + min(limits, default=math.inf)


def _integer(node: Node) -> float:
    bounds = [node.get("minimum"), node.get("maximum")]
    return math.inf if None in bounds else max(len(str(bound)) for bound in bounds)


def _utf8_width(ranges: Ranges) -> int:
    return len(chr(ranges[-1][1]).encode())


def _escaped_width(ranges: Ranges) -> int:
    return max(_utf8_width(ranges), 2 if intersection(ranges, ESCAPED) else 1)


def _longest_match(tree: Tree, width: Width) -> float:
    """Of a tree without anchors."""
    if isinstance(tree, Chars):
        return width(tree.ranges)
    if isinstance(tree, Repeat):
        item = _longest_match(tree.item, width)
        return item * (math.inf if tree.high is None else tree.high) if item and tree.high != 0 else 0
    if isinstance(tree, Alt):
        return max((_longest_match(option, width) for option in tree.options), default=0)
    assert isinstance(tree, Seq), "whole() took the anchors"
    return sum(_longest_match(item, width) for item in tree.items)


def _longest_derivation(grammar: Grammar, name: str, known: dict[str, float]) -> float:
    """Of a rule; one that leads back to itself has no bound."""
    if name not in known:
        known[name] = math.inf
        known[name] = max(
            sum(
                _longest_derivation(grammar, symbol.name, known) if isinstance(symbol, Ref) else _utf8_width(symbol)
                for symbol in option
            )
            for option in grammar[name]
        )
    return known[name]
