"""Patterns of JSON Schema: the second validator, which reads them as ECMA-262 does, is the oracle."""

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.constraints import load_constraint, make_validator
from schemas.json_patterns import finds
from schemas.records import ConstraintKind
from tests.schemas.grammar_oracle import accepts, canonical, compile_grammar

ATOMS = [
    *("a", "é", ".", "[.$]", r"\$", r"\.", "$", "^", "[^a]", "(a|b)", r"[^\W\d]", r"[\S]", r"[^\s]", r"[\]\-^]"),
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\u00e9"),
]
patterns = st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(["", "*", "{1,2}"])), min_size=1, max_size=4).map(
    lambda parts: "".join(atom if atom in "^$" else atom + bounds for atom, bounds in parts)
)
texts = st.text(st.sampled_from("aé1 _.$\n\r\t\u2028\ufeff\x1c\x85\xa0٣"), max_size=4)


@settings(max_examples=150, deadline=None)
@given(patterns, st.lists(texts, min_size=4, max_size=8))
def test_a_pattern_finds_what_the_standard_says(pattern: str, candidates: list[str]) -> None:
    oracle = jsonschema_rs.validator_for({"pattern": pattern})
    assert [finds(pattern, text) for text in candidates] == [oracle.is_valid(text) for text in candidates]


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"type": "string", "pattern": "^(?!x)[a-z]+$"}, "a\n"),
        ({"type": "string", "pattern": "^.*$"}, "a\r"),
        ({"type": "string", "pattern": r"^\S*$"}, "\ufeff"),
        ({"type": "string", "not": {"pattern": r"\W$"}}, "é"),
        ({"patternProperties": {"^(?!x)[a-z]+$": True}, "additionalProperties": False}, {"a\n": 1}),
        (
            {"patternProperties": {r"^(?!x)[a-z]+$": {"type": "null"}}, "additionalProperties": {"const": 1}},
            {"a\n": None},
        ),
    ],
)
def test_no_text_that_the_standard_does_not_match_is_ok(schema: Any, document: Any) -> None:
    assert not jsonschema_rs.is_valid(schema, document)
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    assert make_validator(constraint).check(canonical(document))[1] is not None


def test_what_a_pattern_generates_is_matched_by_the_standard() -> None:
    for pattern, text in [("^.$", "\r"), ("^.$", "\u2028"), (r"^\S$", "\ufeff"), (r"^[^\s]$", "\ufeff")]:
        grammar = compile_grammar(load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"pattern": pattern})))
        assert not accepts(grammar, canonical(text))
        assert accepts(grammar, canonical("x"))
