"""What the plan calls enforced, against what the grammar engine really accepts and jsonschema calls valid."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.constraints import (
    Decision,
    GrammarEngine,
    KeywordDecision,
    enforcement_plan,
    grammar_engine,
    grammar_source,
    load_constraint,
    make_validator,
)
from schemas.errors import ConstraintError
from schemas.json_grammar import compile_for
from schemas.json_schema import JsonSchema
from schemas.records import Constraint, ConstraintKind
from tests.schemas.grammar_oracle import accepts, canonical, compile_grammar, compile_json
from tests.schemas.test_json_schema import DRAFTS, suite_groups

CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"

# name: (schema, valid documents that must be generated, invalid documents, keywords that are only checked)
SHAPES: dict[str, tuple[Any, list[Any], list[Any], set[str]]] = {
    "required without properties": ({"type": "object", "required": ["a"]}, [{"a": 1}], [{}, {"b": 1}, 1], set()),
    "dependencies after draft 7": (
        {"type": "object", "dependencies": {"a": ["b"]}},
        [{}, {"a": 1, "b": 2}],
        [{"a": 1}],
        set(),
    ),
    "date in draft 4": (
        {"$schema": DRAFT_4, "type": "string", "format": "date"},
        ["2024-02-29"],
        ["2024-02-30", "x"],
        set(),
    ),
    "base64 with a length": (
        {"$schema": DRAFT_7, "type": "string", "contentEncoding": "base64", "minLength": 8},
        ["aGVsbG8=", "aGVsbG8gd29y"],
        ["abcd", "aGVsbG8", "!!!!!!!!"],
        set(),
    ),
    "JSON in a string": (
        {"$schema": DRAFT_7, "type": "string", "contentMediaType": "application/json"},
        ["{}", "1"],
        [1],
        {"contentMediaType"},
    ),
    "pattern with a long minLength": (
        {"type": "string", "pattern": "^[a-z]+$", "minLength": 60, "maxLength": 70, "not": {"const": "q"}},
        ["a" * 60],
        ["a" * 59, "a" * 71, "A" * 60],
        set(),
    ),
    "pattern that counts nothing with a long minLength": (
        {"type": "string", "pattern": "x", "minLength": 60, "maxLength": 70},
        ["x" * 60],
        ["x" * 71, "a" * 60],
        {"minLength"},
    ),
    "required key not in properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["b", "a"]},
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": 1}, {"a": "x", "b": 1}],
        set(),
    ),
    "anyOf beside properties": (
        {
            "type": "object",
            "properties": {"k": {"type": "string"}},
            "required": ["k"],
            "anyOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "integer"}}, "required": ["b"]},
            ],
        },
        [{"k": "x", "a": 1}, {"k": "x", "b": 1}],
        [{"a": 1}, {"k": "x"}, {"k": "x", "a": "y"}, {"k": 1, "a": 1}],
        set(),
    ),
    "allOf of a type and an enum": (
        {"allOf": [{"type": "string"}, {"enum": ["yes", "no", 3]}]},
        ["yes", "no"],
        [42, 3, "maybe"],
        set(),
    ),
    "allOf merges objects": (
        {"allOf": [CLOSED | {"additionalProperties": True}, {"properties": {"a": {"minimum": 5}, "b": {"const": 1}}}]},
        [{"a": 5}, {"a": 9, "b": 1}],
        [{"a": 4}, {"b": 1}, {"a": 5, "b": 2}, {}],
        set(),
    ),
    "allOf with a closed branch": (
        {"allOf": [CLOSED, {"properties": {"b": {"type": "string"}}}]},
        [{"a": 1}],
        [{"a": 1, "b": "x"}, {"b": "x"}],
        set(),
    ),
    "$ref with a sibling": (
        {"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 3},
        ["abc", ""],
        ["abcd", 1],
        set(),
    ),
    "$ref with a sibling, draft 7": (
        {"$schema": DRAFT_7, "definitions": {"s": {"type": "string"}}, "$ref": "#/definitions/s", "maxLength": 3},
        ["abcd"],
        [1],
        set(),
    ),
    "type beside enum": ({"type": "string", "enum": ["a", 1]}, ["a"], [1, "b"], set()),
    "const of another type": ({"type": ["string", "null"], "enum": ["a", None, 2]}, ["a", None], [2], set()),
    "enum of everything": (
        {"enum": ["é", 'q"\\', "a/b", "\n", "\x7f", "\u2028", "", 1, 1.5, -0.25, True, None, []]},
        ["é", 'q"\\', "a/b", "\n", "\u2028", "", 1, 1.5, -0.25, True, None, []],
        [2, "e", False, [1]],
        set(),
    ),
    "enum of integers beyond 53 bits": ({"enum": [2**60 + 1, 1 - 2**63]}, [2**60 + 1, 1 - 2**63], [2**60, "x"], set()),
    "enum of integers beyond 64 bits": ({"enum": [2**70]}, [2**70], ["x"], {"enum"}),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)[a-z]+$"}, ["abc"], [1], {"pattern"}),
    "not of a type": ({"not": {"type": ["object", "array", "null"]}}, ["a", 1], [{}, [], None], set()),
    "not": ({"type": "string", "not": {"maxLength": 2}}, ["abc"], [1], set()),
    "if then": (
        CLOSED | {"properties": {"a": {"type": "integer"}, "b": {}}, "if": {"required": ["b"]}, "then": False},
        [{"a": 1}],
        [{}],
        set(),
    ),
    "oneOf with overlap": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, [1], ["a"], {"oneOf"}),
    "oneOf of types": ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None], set()),
    "oneOf with a discriminator": (
        {
            "oneOf": [
                {"properties": {"t": {"const": "x"}, "v": {"type": "integer"}}, "required": ["t", "v"]},
                {"properties": {"t": {"const": "y"}, "v": {"type": "string"}}, "required": ["t", "v"]},
            ]
        },
        [{"t": "x", "v": 1}, {"t": "y", "v": "a"}],
        [{"t": "x", "v": "a"}, {"t": "z", "v": 1}, {}],
        set(),
    ),
    "oneOf of required keys": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}],
        [{}],
        set(),
    ),
    "uniqueItems": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        [[1]],
        [["a"]],
        {"uniqueItems"},
    ),
    "uniqueItems without a type": (
        {"items": {"type": "integer"}, "uniqueItems": True},
        [[1]],
        [["a"]],
        {"uniqueItems"},
    ),
    "contains": ({"type": "array", "contains": {"const": 1}}, [[1, 2]], [{}], {"contains"}),
    "pattern and maxLength": (
        {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3, "minLength": 2},
        ["ab", "abc"],
        ["abcd", "a", "AB", ""],
        set(),
    ),
    "pattern that maxLength cannot join": (
        {"type": "string", "pattern": "^(ab)+$", "maxLength": 5},
        ["ab", "abab"],
        ["a"],
        set(),
    ),
    "pattern within its lengths": ({"type": "string", "pattern": "^[A-Z]{2,4}$", "maxLength": 9}, ["AB"], ["A"], set()),
    "pattern without anchors": ({"type": "string", "pattern": "cat"}, ["concatenate", "cat"], ["dog", "ca"], set()),
    "pattern with half an anchor": ({"type": "string", "pattern": "^a|b$"}, ["ax", "xb", "a"], ["xa", "bx"], set()),
    "pattern with shorthands": (
        {"type": "string", "pattern": r"^\d\s\w\S$"},
        ["1 aé", "1 ax"],
        ["x aé", "1xax", "1 a "],
        set(),
    ),
    "pattern that needs a quote": ({"type": "string", "pattern": '^"a"$'}, ['"a"'], [1], set()),
    "two patterns": ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "b$"}]}, ["ab"], ["b"], set()),
    "format date": ({"type": "string", "format": "date"}, ["2024-04-30"], ["2024-02-30", "2024-13-01", "x"], set()),
    "format e-mail and maxLength": (
        {"type": "string", "format": "email", "maxLength": 9},
        ["a@bc.de"],
        ["x", "a b"],
        set(),
    ),
    "format uuid": (
        {"type": "string", "format": "uuid"},
        ["123e4567-e89b-12d3-a456-426614174000"],
        ["123e4567e89b12d3a456426614174000", "x"],
        set(),
    ),
    "format ipv4": ({"type": "string", "format": "ipv4"}, ["192.168.0.1"], ["256.1.1.1", "1.1.1", "01.1.1.1"], set()),
    "format nobody knows": ({"type": "string", "format": "colour-of-money"}, ["green"], [1], set()),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"x_a": 1}, {"x_a": 1, "x_b": 2}],
        [{"x_a": "s"}, {"y": 1}],
        set(),
    ),
    "patternProperties and properties": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^x_": {"type": "integer"}}},
        [{"a": 1}, {"a": 1, "x_b": 1}],
        [1],
        set(),
    ),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
        [{"A": 1}, {"a": "x"}],
        set(),
    ),
    "propertyNames of known keys": (
        {"properties": {"a": {}, "B": {}}, "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": False},
        [{"a": 1}, {}],
        [{"B": 1}],
        set(),
    ),
    "minItems without items": ({"type": "array", "minItems": 1}, [[1], ["a", {}]], [[], 1], set()),
    "forbidden property": (
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}, "required": ["b"]},
        [{"b": None}],
        [{"a": 1, "b": None}],
        set(),
    ),
    "tuple of draft 7": (
        {
            "$schema": DRAFT_7,
            "type": "array",
            "items": [{"type": "integer"}, {"type": "string"}],
            "additionalItems": False,
        },
        [[], [1], [1, "a"]],
        [["a"], [1, 2], [1, "a", None]],
        set(),
    ),
    "tuple with a rest": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}],
            "items": {"type": "null"},
            "minItems": 1,
            "maxItems": 3,
        },
        [[1], [1, None, None]],
        [[], [None], [1, 2], [1, None, None, None]],
        set(),
    ),
    "exclusiveMinimum of draft 4": (
        {"$schema": DRAFT_4, "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        [4, 99],
        [3, 2],
        set(),
    ),
    "integer range": (
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 1000},
        [-5, 0, 999],
        [-6, 1000, 1.5],
        set(),
    ),
    "integer range with fractions": ({"type": "integer", "minimum": 2.5, "maximum": 4.2}, [3, 4], [2, 5], set()),
    "integer range beyond 64 bits": ({"type": "integer", "minimum": 0, "maximum": 2**70}, [0, 7], [-1, "a"], set()),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, [0, 3, -3, 300], [1, -4], set()),
    "multipleOf in a range": (
        {"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 12},
        [5, 10],
        [0, 6, 15],
        set(),
    ),
    "multipleOf above a minimum": ({"type": "integer", "multipleOf": 5, "minimum": 1}, [5], [0], set()),
    "multipleOf of a number": ({"type": "number", "multipleOf": 2}, [2, 4], [1, 2.5], set()),
    "multipleOf a fraction": ({"type": "number", "multipleOf": 0.01}, [0.5], ["a"], set()),
    "number range": (
        {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        [0, 0.1, 0.25, 0.999999],
        [-0.1, 1, 1.1, 1.0, 5],
        set(),
    ),
    "number range of known failures": (
        {"type": "number", "minimum": 0, "exclusiveMinimum": 0, "maximum": 1},
        [0.1, 1],
        [0, 1.1, -0.1],
        set(),
    ),
    "number range too fine": (
        {"type": "number", "minimum": 1e-8, "maximum": 2e-8},
        [],
        ["a", 1e-8 - 1e-9, 0.5, 0],
        set(),
    ),
    "open because nothing is said": (
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        [{}, {"a": 1}, {"a": 1, "b": "x"}],
        [{"a": "x"}],
        set(),
    ),
    "open on purpose": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
        [{}, {"a": 1}, {"a": 1, "b": "x"}],
        [1],
        set(),
    ),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, [{}, {"a": 1}], [{"a": "x"}], set()),
    "map of counted size": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 2},
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
        set(),
    ),
    "counted properties": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
        [{"a": None}, {"b": None}],
        [{}, {"a": None, "b": None}],
        set(),
    ),
    "recursion": (
        {
            "type": "object",
            "properties": {"n": {"type": "integer"}, "next": {"$ref": "#"}},
            "required": ["n"],
            "additionalProperties": False,
        },
        [{"n": 1}, {"n": 1, "next": {"n": 2}}],
        [{"n": 1, "next": {}}, {"n": 1, "next": 1}],
        set(),
    ),
    "recursion through anyOf": (
        {
            "$defs": {"tree": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]}},
            "$ref": "#/$defs/tree",
        },
        [1, [1, [2, []]]],
        ["a", [1, ["a"]]],
        set(),
    ),
    "pointer escapes": (
        {"$defs": {"a b/~%": {"type": "null"}}, "$ref": "#/$defs/a%20b~1~0%25"},
        [None],
        [1],
        set(),
    ),
    "anchor and id": (
        {"$id": "https://x.example/root", "$defs": {"a": {"$anchor": "here", "type": "null"}}, "$ref": "#here"},
        [None],
        [1],
        set(),
    ),
    "unevaluatedProperties": (
        {
            "allOf": [{"properties": {"a": {"type": "integer"}}}],
            "properties": {"b": {"type": "integer"}},
            "unevaluatedProperties": False,
        },
        [{"b": 1, "a": 1}, {}],
        [{"c": 1}, {"a": "x"}],
        set(),
    ),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        [{"a": 1, "b": 1}],
        [1],
        set(),
    ),
    "oneOf that overlaps in an object": (
        {"oneOf": [{"required": ["a"]}, {"properties": {"a": {"type": "null"}}}], "type": "object"},
        [{"a": 1}, {"b": 1}, {}],
        [{"a": None}],
        set(),
    ),
    "not of keys": (
        {"type": "object", "not": {"required": ["a", "b"]}},
        [{}, {"a": 1}, {"c": 1}],
        [{"a": 1, "b": 1}],
        set(),
    ),
    "not of texts": ({"type": "string", "not": {"enum": ["ab", "b"]}}, ["a", "abc", "", "é"], ["ab", "b"], set()),
    "not of a pattern": ({"type": "string", "not": {"pattern": "^a"}}, ["b"], [1], {"not"}),
    "if then else": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["x", "y"]}, "v": {}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "x"}}},
            "then": {"properties": {"v": {"type": "integer"}}},
            "else": {"required": ["v"]},
        },
        [{"kind": "x"}, {"kind": "x", "v": 1}, {"kind": "y", "v": "a"}],
        [{"kind": "x", "v": "a"}, {"kind": "y"}],
        set(),
    ),
    "dependencies of draft 7": (
        {"$schema": DRAFT_7, "dependencies": {"a": ["b"], "c": {"required": ["d"]}}, "type": "object"},
        [{}, {"a": 1, "b": 1}, {"b": 1}, {"c": 1, "d": 1}],
        [{"a": 1}, {"c": 1}, {"a": 1, "b": 1, "c": 1}],
        set(),
    ),
    "dependentSchemas": (
        {"type": "object", "dependentSchemas": {"a": {"properties": {"b": {"type": "null"}}}}},
        [{"b": 1}, {"b": None, "a": 1}],
        [{"b": 1, "a": 1}],
        set(),
    ),
    "keys by two patterns": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "string"}},
            "additionalProperties": {"type": "null"},
        },
        [{"x1": 1, "y": "a", "z": None}],
        [{"x": "a"}, {"y": 1}, {"z": 1}],
        set(),
    ),
    "keys by patterns that overlap": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 5}}},
        [{"xa": 1}],
        [1],
        {"patternProperties"},
    ),
    "keys by patterns that overlap where one allows nothing": (
        {
            "type": "object",
            "patternProperties": {"^[a-c]$": {"type": "number"}, "b$": False},
            "additionalProperties": False,
        },
        [],
        ["a"],
        {"patternProperties", "additionalProperties"},
    ),
    "keys by digits beside others": (
        {
            "type": "object",
            "patternProperties": {r"^\d+$": {"type": "integer"}},
            "additionalProperties": {"type": "null"},
        },
        [{"12": 1, "é": None, "٣": None}],
        [{"12": None}, {"a": 1}],
        set(),
    ),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"b": 1, "a": 2}],
        [{"c": 1}, {"a": "x"}],
        set(),
    ),
    "propertyNames of a length": (
        {"type": "object", "propertyNames": {"maxLength": 2}},
        [{}, {"a": 1}, {"é😀": 1}],
        [{"abc": 1}],
        set(),
    ),
    "minProperties of optional keys": (
        {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "minProperties": 1},
        [{"a": None}, {"b": None}, {"c": 1}, {"a": None, "c": 1}],
        [{}, {"a": 1}],
        set(),
    ),
    "forbidden key of an open object": (
        {"type": "object", "properties": {"a": False, "b": {"type": "null"}}},
        [{"b": None, "c": 1}, {}],
        [{"a": 1}],
        set(),
    ),
    "format uri": ({"type": "string", "format": "uri"}, ["https://a.b/c?d=e#f", "urn:x:y"], ["x y", "/a"], set()),
    "format and pattern and length": (
        {"type": "string", "format": "date", "pattern": "^2024", "maxLength": 10},
        ["2024-02-29"],
        ["2023-01-01", "2024"],
        set(),
    ),
    "optional part that ends in a loop": (
        {"type": "string", "pattern": "^a(b[0-9]{1,3})?c(d[a-z]+)?$"},
        ["ac", "ab12c", "ab1cdef"],
        ["a1c", "acz", "ab1234c"],
        set(),
    ),
    "enum of objects": ({"enum": [{"a": 1, "b": [1, "x"]}]}, [{"a": 1, "b": [1, "x"]}], [{"a": 1}], set()),
    "a least length alone": ({"type": "string", "minLength": 2}, ['a"', "a\n", "a\\b"], ["", "a"], set()),
    "unevaluatedProperties beside additionalProperties": (
        {"type": "object", "additionalProperties": {"type": "integer"}, "unevaluatedProperties": False},
        [{}, {"a": 1}],
        [{"a": "x"}],
        set(),
    ),
    "true": (True, [1, {"a": [None]}], [], set()),
    "no type and no object possible": (
        {"additionalProperties": False, "minProperties": 1},
        [1, "a", None],
        [{}],
        set(),
    ),
    "no type and nothing forbidden": ({"additionalProperties": True, "required": []}, [1, "a", {"a": 1}], [], set()),
    "no type but lengths": ({"maxLength": 2}, ["ab"], ["abc"], set()),
}


def load(schema: Any) -> Constraint:
    return load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def checked(plan: tuple[KeywordDecision, ...]) -> set[str]:
    return {row.keyword for row in plan if row.decision != Decision.ENFORCED}


@pytest.mark.parametrize("name", SHAPES)
def test_the_plan_says_what_the_engine_does(name: str) -> None:
    schema, valid, invalid, only_checked = SHAPES[name]
    constraint = load(schema)
    validator = JsonSchema(constraint.source).validator
    assert [document for document in valid if not validator.is_valid(document)] == []
    assert [document for document in invalid if validator.is_valid(document)] == []
    assert checked(enforcement_plan(constraint)) == only_checked
    grammar = compile_grammar(constraint)
    assert [document for document in valid if not accepts(grammar, canonical(document))] == []
    assert [document for document in invalid if accepts(grammar, canonical(document))] == []


def test_no_key_of_an_open_object_has_a_second_spelling() -> None:
    constraint = load({"type": "object", "properties": {"a": {"type": "integer"}}})
    grammar = compile_grammar(constraint)
    assert grammar_engine(constraint) is GrammarEngine.LLGUIDANCE
    assert accepts(grammar, '{"a": 1, "b": "x"}')
    assert not accepts(grammar, '{"a": 1, "\\u0061": "x"}')
    assert not accepts(grammar, '{"a": 1, "a": "x"}')


def test_the_plan_says_that_an_object_is_open_because_nothing_is_said() -> None:
    rows = {row.path: row.reason for row in enforcement_plan(load({"items": {"properties": {"a": {"type": "null"}}}}))}
    assert rows["/items/additionalProperties"].startswith("not said")
    assert not any(row.reason.startswith("not said") for row in enforcement_plan(load(CLOSED)))


def test_xgrammar_is_chosen_where_it_keeps_all_that_people_write() -> None:
    assert grammar_engine(load(CLOSED)) is GrammarEngine.XGRAMMAR
    assert grammar_engine(load({"enum": ["a", 1]})) is GrammarEngine.XGRAMMAR
    assert grammar_engine(load({"enum": [{"a": 1}]})) is GrammarEngine.LLGUIDANCE  # xgrammar leaves out the blanks
    assert grammar_engine(load({"type": "string", "minLength": 2})) is GrammarEngine.LLGUIDANCE  # and what is escaped
    assert grammar_engine(load({"type": "string", "pattern": "^.*$"})) is GrammarEngine.LLGUIDANCE  # and escapes


def test_a_string_of_bounded_length_may_hold_quotes_and_line_breaks_each_of_which_counts_once() -> None:
    grammar = compile_grammar(load({"type": "string", "maxLength": 4}))
    assert accepts(grammar, canonical('a"\n\\'))
    assert not accepts(grammar, canonical('a"\n\\b'))


def blamed(schema: Any, document: Any) -> set[str]:
    """Pointers of the keywords that a document breaks, with all keywords around them."""
    pointers: set[str] = set()
    queue = list(JsonSchema(json.dumps(schema)).validator.iter_errors(document))
    while queue:
        error = queue.pop()
        path = [str(part) for part in error.absolute_schema_path]
        around = [path[:length] for length in range(1, len(path) + 1)]
        around += [[*parts[:-1], "if"] for parts in around if parts[-1] in ("then", "else")]
        pointers |= {"/" + "/".join(parts) for parts in around}
        queue += error.context or []
    return pointers


leaf_schemas = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("integer")}, optional={"minimum": st.integers(-9, 9), "maximum": st.integers(-3, 12)}
    ),
    st.fixed_dictionaries({"type": st.just("number")}, optional={"exclusiveMinimum": st.sampled_from([0, 0.5, -1.25])}),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"maxLength": st.integers(0, 3), "pattern": st.sampled_from(["^a", "b$", "^[ab]+$"])},
    ),
    st.fixed_dictionaries({"enum": st.lists(st.sampled_from(["a", "ab", 1, 2.5, None, True]), min_size=1)}),
    st.sampled_from([{"type": "null"}, {}, True, {"type": ["integer", "null"]}, {"minLength": 1}, {"const": {"a": 1}}]),
)


def compound(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b"])
    objects = st.fixed_dictionaries(
        {},
        optional={
            "type": st.just("object"),
            "properties": st.dictionaries(keys, children, max_size=2),
            "required": st.lists(keys, unique=True),
            "additionalProperties": st.one_of(st.booleans(), children),
            "minProperties": st.integers(0, 2),
            "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), children, max_size=1),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array")},
        optional={
            "items": children,
            "prefixItems": st.lists(children, min_size=1, max_size=2),
            "minItems": st.integers(0, 2),
            "maxItems": st.integers(0, 2),
            "uniqueItems": st.booleans(),
        },
    )
    branches = st.lists(children, min_size=1, max_size=2)
    plain = st.one_of(objects, arrays, leaf_schemas.filter(lambda schema: isinstance(schema, dict)))
    joined = st.tuples(plain, st.sampled_from(["anyOf", "oneOf", "allOf"]), branches).map(
        lambda t: {**t[0], t[1]: t[2]}
    )
    negated = st.tuples(plain, children).map(lambda t: {**t[0], "not": t[1]})
    conditional = st.tuples(plain, children, children, children).map(
        lambda t: {**t[0], "if": t[1], "then": t[2], "else": t[3]}
    )
    dependent = st.tuples(plain, keys, st.one_of(st.lists(keys, max_size=2, unique=True), children)).map(
        lambda t: {**t[0], "dependentRequired" if isinstance(t[2], list) else "dependentSchemas": {t[1]: t[2]}}
    )
    named = st.tuples(plain, leaf_schemas).map(lambda t: {**t[0], "propertyNames": t[1]})
    return st.one_of(objects, arrays, joined, negated, conditional, dependent, named)


schemas = st.recursive(leaf_schemas, compound, max_leaves=5)
documents = st.recursive(
    st.sampled_from([None, True, 0, 1, 3, -2, 0.5, 2.5, "", "a", "ab", "ba", "abcd"]),
    lambda children: st.one_of(
        st.lists(children, max_size=2), st.dictionaries(st.sampled_from(["a", "b", "c"]), children, max_size=2)
    ),
    max_leaves=4,
)


@pytest.mark.parametrize("engine", GrammarEngine)
@settings(max_examples=250, deadline=None)
@given(schemas, st.lists(documents, min_size=6, max_size=12))
def test_no_random_schema_lets_a_document_break_an_enforced_keyword(
    engine: GrammarEngine, schema: Any, candidates: list[Any]
) -> None:
    try:
        document_schema = JsonSchema(json.dumps(schema))
        compiled = compile_for(engine, document_schema)
    except ConstraintError as error:
        validator = JsonSchema(json.dumps(schema)).validator if "accepts no finite" in str(error) else None
        assert validator is None or not any(validator.is_valid(document) for document in candidates)
        return
    grammar = compile_json(engine, compiled.source)
    validator = document_schema.validator
    loose = {row.path for row in compiled.plan.rows() if row.decision != Decision.ENFORCED}
    for document in candidates:
        if accepts(grammar, canonical(document)) and not validator.is_valid(document):
            assert blamed(schema, document) & loose, f"{canonical(document)} breaks {blamed(schema, document)}"


@settings(max_examples=150, deadline=None)
@given(
    st.decimals(-20, 20, places=2).map(float),
    st.decimals(0, 10, places=3).map(float),
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.randoms(use_true_random=False),
)
def test_number_bounds_admit_no_number_outside(
    low: float, width: float, low_key: str, high_key: str, randomness: random.Random
) -> None:
    schema = {"type": "number", low_key: low, high_key: low + width}
    try:
        constraint = load(schema)
    except ConstraintError:
        assert width == 0
        return
    grammar = compile_grammar(constraint)
    validator = JsonSchema(constraint.source).validator
    is_enforced = not checked(enforcement_plan(constraint))
    for _ in range(20):
        number = round(randomness.uniform(low - 1, low + width + 1), randomness.randint(0, 7))
        if is_enforced and accepts(grammar, canonical(number)):
            assert validator.is_valid(number)


def test_real_schemas_compile_and_those_fully_enforced_admit_nothing_invalid(shared_data: Path) -> None:
    lines = (shared_data / "schemas-dev.jsonl").read_text().splitlines()
    num_refused = num_full = 0
    for line in lines[::4]:
        entry = json.loads(line)
        try:
            constraint = load(entry["schema"])
        except ConstraintError:
            num_refused += 1
            continue
        if len(constraint.source) > 40_000:
            continue  # the engine takes seconds
        grammar = compile_grammar(constraint)
        if checked(enforcement_plan(constraint)):
            continue
        num_full += 1
        invalid = [test["data"] for test in entry["tests"] if not test["valid"]]
        assert [document for document in invalid if accepts(grammar, canonical(document))] == [], entry["id"]
    assert num_refused <= 0.03 * len(lines) / 4
    assert num_full > 0.8 * len(lines) / 4


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
def test_no_instance_that_the_official_suite_calls_invalid_is_ever_ok(shared_data: Path, draft: str) -> None:
    num_ok = num_full = 0
    for stem, group in suite_groups(shared_data, draft):
        schema = {"$schema": DRAFTS[draft], **group["schema"]} if isinstance(group["schema"], dict) else group["schema"]
        try:
            constraint = load(schema)
        except ConstraintError as error:
            if "no finite" in str(error) and any(test["valid"] for test in group["tests"]):
                pytest.fail(f"{stem}, {group['description']}: {error}")
            continue
        is_full = not checked(enforcement_plan(constraint))
        grammar, validator = compile_grammar(constraint), make_validator(constraint)
        num_full += is_full
        for test in group["tests"]:
            text = canonical(test["data"])
            is_generated = accepts(grammar, text)
            is_ok = is_generated and validator.check(text)[1] is None
            num_ok += is_ok
            assert test["valid"] or not is_ok, (stem, group["description"], text)
            assert test["valid"] or not (is_full and is_generated), (stem, group["description"], text)
    assert num_ok > 300
    assert num_full > 150


def test_keys_keep_the_order_of_the_schema() -> None:
    names = ["reason", "label", "a", "Z", "b"]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}, "required": ["b", "new", "a"]}
    assert list(json.loads(grammar_source(load(schema)))["properties"]) == [*names, "new"]


def test_a_subschema_used_twice_has_the_worse_decision() -> None:
    schema = {
        "$defs": {"s": {"pattern": "^(ab)+$"}},
        "items": {"$ref": "#/$defs/s"},
        "prefixItems": [{"$ref": "#/$defs/s", "maxLength": 3}],
    }
    plan = {
        row.path: row.decision
        for row in compile_for(GrammarEngine.XGRAMMAR, JsonSchema(json.dumps(schema))).plan.rows()
    }
    assert plan["/$defs/s/pattern"] == Decision.ENFORCED
    assert plan["/prefixItems/0/maxLength"] == Decision.CHECKED


def test_a_schema_that_unfolds_too_far_is_checked_only() -> None:
    node: Any = {"type": "string"}
    for _ in range(14):
        node = {"type": "array", "items": node, "anyOf": [{"minItems": 1}, {"maxItems": 3}]}
    assert "anyOf" in checked(enforcement_plan(load(node)))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "enum": [1, 2]},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"anyOf": [False, False]},
    ],
)
def test_a_schema_that_no_document_fits_is_refused(schema: Any) -> None:
    with pytest.raises(ConstraintError, match="no finite document"):
        load(schema)
