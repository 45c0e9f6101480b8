"""llguidance behind the Matcher protocol: its masks are what it accepts, and no model makes it write a wrong text."""

import json
from typing import Any

import pytest

from engine.grammar import Grammars
from engine.guidance import GuidanceMatcher
from engine.states import SharedMatcher
from schemas.constraints import GrammarEngine, grammar_engine, load_constraint, make_validator
from schemas.records import Constraint, ConstraintKind, FinishReason, Request, Sampling
from tests.engine.fakes import (
    END,
    VOCAB_SIZE,
    HashModel,
    allowed_tokens,
    byte_tokenizer,
    make_engine,
    run_all,
    start_matcher,
)

OPEN = {
    "type": "object",
    "properties": {"why": {"type": "string", "pattern": "^[a-zé]+$", "maxLength": 4}, "n": {"multipleOf": 0.5}},
    "required": ["why"],
}
DOCUMENT = '{"why": "né", "n": 2.5, "more": [{"x": null}]}'


def make_grammars() -> Grammars:
    return Grammars(
        byte_tokenizer(), vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END}), timeout_s=20, num_threads=2
    )


def constraint_of(schema: Any) -> Constraint:
    return load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def accepted(matcher: SharedMatcher) -> set[int]:
    """The oracle: try every token and take it back."""
    native = matcher.native
    assert native is not None
    return {token_id for token_id in range(END + 1) if native.accept(token_id) and not native.rollback(1)}


def test_a_mask_is_what_the_matcher_accepts_in_a_batch_of_both_engines() -> None:
    grammars = make_grammars()
    matcher = start_matcher(grammars, constraint_of(OPEN))
    other = start_matcher(grammars, constraint_of({"enum": ["a"]}))
    assert isinstance(matcher.native, GuidanceMatcher)
    assert not isinstance(other.native, GuidanceMatcher)
    for byte in [*DOCUMENT.encode(), END]:
        allowed = allowed_tokens(grammars, [other, None, matcher])
        assert allowed[0] == {ord('"')}
        assert allowed[2] == accepted(matcher)
        assert matcher.accept(byte)
    assert matcher.is_terminated
    assert allowed_tokens(grammars, [other, None, matcher])[2] == set()


def test_an_end_is_seen_taken_and_taken_back() -> None:
    closed = start_matcher(make_grammars(), constraint_of({**OPEN, "additionalProperties": False}))
    assert isinstance(closed.native, GuidanceMatcher)
    assert all(map(closed.accept, b'{"why": "a", "n": 1'))
    assert not closed.is_at_end()
    assert closed.accept(ord("}"))
    assert closed.is_at_end()
    assert closed.forced_text() == ""
    assert closed.accept(END)
    assert closed.is_terminated
    assert not closed.accept(END)
    closed.rollback(2)
    assert not closed.is_terminated
    assert accepted(closed) >= {ord("}"), ord("0")}
    assert not closed.accept(ord("]"))
    assert closed.accept(ord("}"))


def test_forced_text_is_cut_between_characters() -> None:
    matcher = start_matcher(
        make_grammars(), constraint_of({"type": "object", "required": ["é"], "properties": {"é": OPEN}})
    )
    assert matcher.forced_text() == '{"é": {"why": "'
    assert all(map(matcher.accept, '{"é": {"why": "a'.encode()))
    assert matcher.forced_text() == ""


@pytest.mark.parametrize("favourites", [" \n", "0123456789", '{["', "}]", ",:", "eE+-.", "\\u", "aé"])
def test_a_model_that_loves_the_worst_tokens_writes_nothing_invalid_and_ends(favourites: str) -> None:
    schemas: list[Any] = [
        OPEN,
        {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
        {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 77}, "minItems": 2},
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "maxProperties": 2},
        {"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
        {"type": "string", "maxLength": 9},
        {},
    ]
    constraints = [constraint_of(schema) for schema in schemas]
    assert {grammar_engine(constraint) for constraint in constraints} == set(GrammarEngine)
    engine = make_engine(HashModel(favourites=favourites.encode(), boost=100.0))
    requests = []
    for index, constraint in enumerate(constraints):
        engine.add_constraint(constraint)
        sampling = Sampling(max_tokens=40, temperature=0.0)
        requests.append(Request(str(index), text="go", constraint_key=constraint.key, sampling=sampling))
    done = run_all(engine, requests)
    for request, constraint in zip(requests, constraints, strict=True):
        completion = done[request.request_id]
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.CLOSED)
        assert len(completion.token_ids) <= 40
        error = make_validator(constraint).check(completion.text)[1]
        assert error is None or "beyond 64-bit floats" in error  # a number may be 1e999: it is never ok
