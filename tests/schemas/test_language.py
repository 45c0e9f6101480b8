"""The longest text of a constraint, against what the grammar engines let be written."""

import json
import random
from typing import Any

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.guidance import GuidanceGrammar
from schemas.constraints import max_bytes
from schemas.records import Constraint, ConstraintKind
from tests.schemas.grammar_oracle import END, accepts, compile_grammar

STRING = {"type": "string", "maxLength": 5}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def constraint_of(kind: str, source: Any) -> Constraint:
    return Constraint(kind=ConstraintKind(kind), source=source if isinstance(source, str) else json.dumps(source))


BOUNDED: dict[str, tuple[str, Any, str]] = {
    "choices": ("choice", '["cat", "café"]', "café"),
    "a regex": ("regex", "(ab|[x-é]{3})?z", "ééé" + "z"),
    "a grammar": ("ebnf", 'root ::= "a" b{2,3} | "xyz"\nb ::= "ß" | "oo"', "aoooooo"),
    "an enum": ("json_schema", {"enum": ["a", {"b": [1, "ü"]}, 7]}, '{"b": [1, "ü"]}'),
    "a string of bounded length": ("json_schema", STRING, '"😀😀😀😀😀"'),
    "a pattern": ("json_schema", {"type": "string", "pattern": "^[a-c]{2,4}$"}, '"abca"'),
    "a pattern with escapes": ("json_schema", {"type": "string", "pattern": '^["a]{1,3}$'}, '"\\"\\"\\""'),
    "integers": ("json_schema", {"type": "integer", "minimum": -99, "maximum": 7}, "-99"),
    "numbers": ("json_schema", {"type": "number", "minimum": -0.5, "maximum": 10}, "10.000000"),
    "booleans": ("json_schema", {"type": ["boolean", "null"]}, "false"),
    "an object": ("json_schema", closed(a=STRING, b={"enum": [1, 22]}), '{"a": "😀😀😀😀😀", "b": 22}'),
    "arrays": (
        "json_schema",
        {"type": "array", "prefixItems": [{"const": "x"}], "items": {"enum": [1, 10]}, "maxItems": 3},
        '["x", 10, 10]',
    ),
    "nested arrays": (
        "json_schema",
        closed(a={"type": "array", "items": closed(b={"type": "boolean"}), "maxItems": 2}),
        '{"a": [{"b": false}, {"b": false}]}',
    ),
}
UNBOUNDED: dict[str, tuple[str, Any]] = {
    "a star": ("regex", "a*"),
    "a plus in a group": ("regex", "(a|b+)c"),
    "a recursive rule": ("ebnf", 'root ::= "(" root ")" | "."'),
    "a starred rule": ("ebnf", 'root ::= "a"*'),
    "free text": ("json_schema", {"type": "string"}),
    "a search": ("json_schema", {"type": "string", "pattern": "a"}),
    "an open object": ("json_schema", {"type": "object", "properties": {"a": {"enum": [1]}}}),
    "keys by pattern": (
        "json_schema",
        {"type": "object", "patternProperties": {"^a$": {"enum": [1]}}, "additionalProperties": False},
    ),
    "an integer": ("json_schema", {"type": "integer", "minimum": 0}),
    "a number": ("json_schema", {"type": "number", "maximum": 1}),
    "items without a count": ("json_schema", {"type": "array", "items": {"enum": [1]}}),
    "a property in a property": ("json_schema", closed(a=closed(b={"type": "integer"}))),
    "a schema in itself": (
        "json_schema",
        {"$defs": {"n": closed(n={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]})}, "$ref": "#/$defs/n"},
    ),
    "anything": ("json_schema", {}),
    "a constraint that cannot be compiled": ("regex", "("),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_the_longest_text_can_be_written_and_is_as_long_as_said(name: str) -> None:
    kind, source, longest = BOUNDED[name]
    constraint = constraint_of(kind, source)
    assert accepts(compile_grammar(constraint), longest)
    assert max_bytes(constraint) == len(longest.encode())


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_may_go_on_for_ever_has_no_longest_text(name: str) -> None:
    assert max_bytes(constraint_of(*UNBOUNDED[name])) is None


leaves = st.one_of(
    st.integers(0, 4).map(lambda length: {"type": "string", "maxLength": length}),
    st.sampled_from(["^[a-c]{0,3}$", '^(\\\\|"|é)?x{2}$', "^(ab|\\n){1,2}$"]).map(
        lambda p: {"type": "string", "pattern": p}
    ),
    st.tuples(st.integers(-120, 9), st.integers(0, 200)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.tuples(st.integers(-120, 9), st.integers(1, 200)).map(
        lambda pair: {"type": "number", "minimum": pair[0] / 8, "exclusiveMaximum": pair[0] / 8 + pair[1]}
    ),
    st.lists(st.sampled_from(["a", "é\n", "\x7f", 1.5, None, [1, {"k": "v"}]]), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.just({"type": ["boolean", "null"]}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.dictionaries(st.sampled_from(["a", "é", "key\n"]), inner, max_size=3).map(lambda members: closed(**members)),
        st.tuples(inner, st.integers(0, 3)).map(lambda pair: {"type": "array", "items": pair[0], "maxItems": pair[1]}),
    ),
    max_leaves=5,
)


@given(schemas, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_no_random_text_is_longer(schema: dict[str, Any], seed: int) -> None:
    constraint = constraint_of("json_schema", schema)
    longest = max_bytes(constraint)
    grammar, chance = compile_grammar(constraint), random.Random(seed)
    for _ in range(3):
        assert longest is None or len(write(grammar, chance)) <= longest


def write(grammar: xgrammar.CompiledGrammar | GuidanceGrammar, chance: random.Random) -> bytes:
    """A random text, byte by byte; it ends where it must."""
    guided = grammar.start() if isinstance(grammar, GuidanceGrammar) else None
    accept = guided.accept if guided else xgrammar.GrammarMatcher(grammar).accept_token
    text = bytearray()
    order = list(range(256))
    while True:
        chance.shuffle(order)
        byte = next((byte for byte in order if accept(byte)), None)
        if byte is None:
            assert accept(END), bytes(text)
            return bytes(text)
        text.append(byte)
