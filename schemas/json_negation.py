"""The opposite of a JSON Schema, as a union that a grammar can generate; None where that is not possible.

``not``, ``if`` and an overlapping ``oneOf`` become unions this way. Knows no grammar engine.
"""

from collections.abc import Callable
from typing import Any

from schemas.json_drafts import DRAFT_4
from schemas.json_schema import APPLICATORS, ASSERTIONS, JsonSchema, Sub
from schemas.regex import all_but, print_regex

TYPES = ("null", "boolean", "number", "string", "array", "object")
MAX_DEPTH = 6
MAX_TEXT_CHARS = 2_000
COUNTS = {"Length": "string", "Items": "array", "Properties": "object"}
BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}

Alternatives = list[Any]
"""Schemas, each of which a document may fit; none: no document fits."""


class _Unknown(Exception):
    """A keyword whose opposite cannot be written as a schema that is generated exactly."""


def negate(sub: Sub, document: JsonSchema) -> Any:
    """A schema that accepts just what ``sub`` rejects and stands where ``sub`` does; None if there is none."""
    try:
        return _union(_negate(sub, document, 0))
    except _Unknown:
        return None


def _union(alternatives: Alternatives) -> Any:
    return {"anyOf": alternatives} if alternatives else False


def _negate(sub: Sub, document: JsonSchema, depth: int) -> Alternatives:
    if isinstance(sub.schema, bool):
        return [] if sub.schema else [True]
    if depth > MAX_DEPTH:
        raise _Unknown
    if isinstance(sub.get("$ref"), str):
        target = sub.target()
        if target.resolver is not sub.resolver:
            raise _Unknown
        alternatives = _negate(target, document, depth + 1)
        if document.ignores_ref_siblings:
            return alternatives
    else:
        alternatives = []
    known = document.draft.VALIDATORS
    for keyword, value in sub.schema.items():
        if keyword == "$ref" or keyword not in ASSERTIONS | APPLICATORS or keyword not in known:
            continue
        if keyword == "format" and value not in document.draft.FORMAT_CHECKER.checkers:
            continue
        alternatives += _negate_keyword(sub, keyword, value, document, depth + 1)
    return alternatives


def _negate_keyword(sub: Sub, keyword: str, value: Any, document: JsonSchema, depth: int) -> Alternatives:
    def negated(*parts: str | int) -> Alternatives:
        return _negate(sub.child(*parts), document, depth)

    simple: dict[str, Callable[[], Alternatives]] = {
        "type": lambda: _other_types(value),
        "enum": lambda: _other_values(value),
        "const": lambda: _other_values([value]),
        "required": lambda: [{"type": "object", "properties": {name: False}} for name in value],
        "not": lambda: [value],
        "allOf": lambda: [alternative for index in range(len(value)) for alternative in negated("allOf", index)],
        "anyOf": lambda: [{"allOf": [_union(negated("anyOf", index)) for index in range(len(value))]}],
        "properties": lambda: [
            {"type": "object", "required": [name], "properties": {name: alternative}}
            for name in value
            for alternative in negated("properties", name)
        ],
    }
    if keyword in simple:
        return simple[keyword]()
    if keyword == "oneOf" and len(value) == 2:
        neither = [_union(negated("oneOf", index)) for index in range(2)]
        return [{"allOf": list(value)}, {"allOf": neither}]
    for suffix, type_name in COUNTS.items():
        if keyword == f"min{suffix}":
            return [{"type": type_name, f"max{suffix}": value - 1}] if value > 0 else []
        if keyword == f"max{suffix}":
            return [{"type": type_name, f"min{suffix}": value + 1}]
    if keyword in BOUNDS and document.draft is not DRAFT_4:  # whose exclusive bounds are flags
        return [{"type": "number", BOUNDS[keyword]: value}]
    raise _Unknown


def _other_types(names: str | list[str]) -> Alternatives:
    excluded = {names} if isinstance(names, str) else set(names)
    if "integer" in excluded and "number" not in excluded:
        raise _Unknown
    others = [name for name in TYPES if name not in excluded]
    return [{"type": others}] if others else []


def _other_values(values: list[Any]) -> Alternatives:
    """All but some strings, booleans and null."""
    texts = [value for value in values if isinstance(value, str)]
    if any(not isinstance(value, str | bool | None) for value in values) or sum(map(len, texts)) > MAX_TEXT_CHARS:
        raise _Unknown
    others = [name for name in TYPES if name not in ("boolean", "string") and (name != "null" or None not in values)]
    flags = [flag for flag in (False, True) if not any(value is flag for value in values)]
    text = {"type": "string", "pattern": f"^({print_regex(all_but(texts))})$"} if texts else {"type": "string"}
    return [{"type": others}, text, *([{"enum": flags}] if flags else [])]
