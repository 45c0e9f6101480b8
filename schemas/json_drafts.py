"""The drafts of JSON Schema as they are read here: jsonschema's validators, stricter where people mean more.

What a label's author would take for kept is kept: ``dependencies`` in drafts that renamed it, ``date`` in drafts that
had no such format, base64 and JSON as the content of strings, formats by their RFCs where jsonschema is lax, and
patterns by ECMA-262.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from typing import Any

from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
    FormatChecker,
)
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend, validator_for

from schemas.json_formats import conforms
from schemas.json_patterns import finds

Errors = Iterator[ValidationError]
DECIMAL_DIGITS = 5_000  # the quotient of the longest integer that Python reads and the smallest 64-bit float


def _multiple_of(validator: Any, factor: Any, value: Any, schema: Any) -> Errors:
    """``multipleOf`` by decimal digits: in binary 0.3 would be no multiple of 0.1."""
    if not validator.is_type(value, "number"):
        return
    if isinstance(value, int) and isinstance(factor, int):
        remainder: Any = value % factor
    else:
        with localcontext(prec=DECIMAL_DIGITS):
            remainder = Decimal(repr(value)) % Decimal(repr(factor))
    if remainder:
        yield ValidationError(f"{value!r} is not a multiple of {factor}")


def _pattern(validator: Any, pattern: str, text: Any, schema: Any) -> Errors:
    """``pattern`` as ECMA-262 reads it."""
    if validator.is_type(text, "string") and not finds(pattern, text):
        yield ValidationError(f"{text!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, value: Any, schema: Any) -> Errors:
    """``patternProperties``, the keys found likewise."""
    if not validator.is_type(value, "object"):
        return
    for pattern, subschema in patterns.items():
        for key, item in value.items():
            if finds(pattern, key):
                yield from validator.descend(item, subschema, path=key, schema_path=pattern)


def _additional_properties(validator: Any, subschema: Any, value: Any, schema: Any) -> Errors:
    """``additionalProperties``: of the keys that are neither declared nor found by a pattern."""
    if not validator.is_type(value, "object"):
        return
    declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, item in value.items():
        if key in declared or any(finds(pattern, key) for pattern in patterns):
            continue
        if subschema is False:
            yield ValidationError(f"Additional properties are not allowed ({key!r} was unexpected)")
        else:
            yield from validator.descend(item, subschema, path=key)


def _content(validator: Any, _value: Any, text: Any, schema: Any) -> Errors:
    """``contentEncoding`` base64 and ``contentMediaType`` JSON, one within the other."""
    if not validator.is_type(text, "string"):
        return
    content: str | bytes = text
    if schema.get("contentEncoding") == "base64":
        try:
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            yield ValidationError(f"{text!r} is not base64")
            return
    if schema.get("contentMediaType") == "application/json":
        try:
            json.loads(content)
        except ValueError:
            yield ValidationError(f"{text!r} does not hold JSON")


CONTENT = {"contentEncoding": _content, "contentMediaType": _content}
PATTERNS = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
DEPENDENCIES = {"dependencies": Draft7Validator.VALIDATORS["dependencies"]}


def _format_checker(draft: Any) -> FormatChecker:
    """The draft's formats and some that no draft may be without, each by the stricter of two judgements."""
    names = {*draft.FORMAT_CHECKER.checkers, "date", "time"}
    if "idn-hostname" in names:
        names |= {"iri", "iri-reference"}
    checker = FormatChecker(())
    for name in names:
        check, raises = Draft202012Validator.FORMAT_CHECKER.checkers.get(name, (lambda _: True, ()))
        checker.checkers[name] = (_both(check, name), raises)
    return checker


def _both(check: Callable[[Any], Any], name: str) -> Callable[[Any], bool]:
    return lambda value: check(value) and (not isinstance(value, str) or conforms(value, name))


def _read(draft: Any, keywords: dict[str, Any]) -> Any:
    more = {"multipleOf": _multiple_of, **PATTERNS, **keywords}
    return extend(draft, more, format_checker=_format_checker(draft))  # type: ignore[no-untyped-call]


_NEW_IN_6 = frozenset(("const", "contains", "propertyNames"))
_NEW_IN_7 = frozenset(("if", "then", "else"))
_NEW_IN_2019 = frozenset(
    (
        *("dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems"),
        *("minContains", "maxContains", "$recursiveRef"),
    )
)
_NEW_IN_2020 = frozenset(("prefixItems", "$dynamicRef"))
UNLIKE = (_NEW_IN_6 | _NEW_IN_7 | _NEW_IN_2019 | _NEW_IN_2020) | {
    *("$ref", "additionalItems", "dependencies", "exclusiveMinimum", "exclusiveMaximum", "format"),
    *("contentEncoding", "contentMediaType", "extends", "disallow", "divisibleBy"),
}
"""Keywords that some drafts lack, or read otherwise."""

DRAFT_3 = Draft3Validator
DRAFT_4 = _read(Draft4Validator, {})
DRAFT_6 = _read(Draft6Validator, CONTENT)
DRAFT_7 = _read(Draft7Validator, CONTENT)
DRAFT_2019_09 = _read(Draft201909Validator, DEPENDENCIES)
DRAFT_2020_12 = _read(Draft202012Validator, DEPENDENCIES)
_BY_BASE: dict[Any, Any] = {
    Draft3Validator: DRAFT_3,
    Draft4Validator: DRAFT_4,
    Draft6Validator: DRAFT_6,
    Draft7Validator: DRAFT_7,
    Draft201909Validator: DRAFT_2019_09,
    Draft202012Validator: DRAFT_2020_12,
}


LATER = {
    DRAFT_4: _NEW_IN_6 | _NEW_IN_7 | _NEW_IN_2019 | _NEW_IN_2020,
    DRAFT_6: _NEW_IN_7 | _NEW_IN_2019 | _NEW_IN_2020,
    DRAFT_7: _NEW_IN_2019 | _NEW_IN_2020,
    DRAFT_2019_09: _NEW_IN_2020,
    DRAFT_2020_12: frozenset(("$recursiveRef",)),
}
"""Keywords of other drafts that a draft reads as annotations."""


def draft_of(schema: Any) -> Any:
    """The validator class of the schema's ``$schema``; draft 2020-12 where it names none that we know."""
    name = schema.get("$schema") if isinstance(schema, dict) else None
    if not isinstance(name, str):
        return DRAFT_2020_12
    for spelling in (name, name.rstrip("#"), name.rstrip("#").replace("https://json-schema", "http://json-schema")):
        for uri in (spelling, spelling + "#"):
            found: Any = validator_for({"$schema": uri}, default=None)  # type: ignore[arg-type]
            if found in _BY_BASE:
                return _BY_BASE[found]
    return DRAFT_2020_12


def is_read_alike(schema: Any) -> bool:
    """Whether it surely means the same in all drafts from 4 on: nothing in it is named like a keyword that does not."""
    if isinstance(schema, list):
        return all(map(is_read_alike, schema))
    if not isinstance(schema, dict):
        return True
    is_tuple = isinstance(schema.get("items"), list)
    return not is_tuple and not UNLIKE & schema.keys() and all(map(is_read_alike, schema.values()))
