"""A budget that runs out ends a document instead of cutting it, whatever the model would rather write."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.closing import Position, exchange
from engine.grammar import Grammars
from engine.text import Text
from schemas.completion import Walker
from schemas.constraints import language_of, load_constraint, make_validator
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, Request, Sampling
from tests.demo_model import demo_model
from tests.engine.fakes import HashModel, byte_tokenizer, finish_all, make_engine, start_matcher
from tests.schemas.grammar_oracle import accepts, compile_grammar
from tests.schemas.test_language import schemas


class WorstModel(HashModel):
    """Prefers one kind of bytes over all others, in an order, wherever the grammar lets it."""

    def __init__(self, favourites: bytes) -> None:
        super().__init__()
        self.preference = torch.zeros_like(self.preference)
        for rank, byte in enumerate(favourites):
            self.preference[byte] = 1000.0 - 10 * rank


WORST = {
    "blanks": b" \t\n",
    "digits": b"9876543210-.eE",
    "brackets": b"[{(",
    "nesting": b'{"[,:',
    "quotes": b'"\\u',
    "commas": b", []{}",
    "letters": b"xyzabc",
    "open characters": bytes(range(0xF4, 0xBF, -1)) + bytes(range(0x80, 0xC0)),
}


LOOSE = ("beyond 64-bit floats", "stands twice in one object")
"""What grammars let through: the validator refuses it, so such a row is not ``ok``."""


def json_schema(**properties: Any) -> Constraint:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))


def of_kind(kind: ConstraintKind, source: str) -> Constraint:
    return load_constraint(kind, source)


TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/tree",
}
CONSTRAINTS = {
    "text and label": json_schema(reason={"type": "string"}, label={"enum": ["billing", "bug"]}),
    "numbers": json_schema(a={"type": "integer"}, b={"type": "number"}, c={"type": "integer", "minimum": 100}),
    "bounded numbers": json_schema(a={"type": "number", "exclusiveMinimum": 0, "maximum": 1.5}),
    "multiples": json_schema(a={"type": "integer", "multipleOf": 7, "minimum": 1000}),
    "lists": json_schema(tags={"type": "array", "items": {"type": "string", "minLength": 2}, "minItems": 2}),
    "anything": of_kind(ConstraintKind.JSON_SCHEMA, "{}"),
    "an open object": of_kind(
        ConstraintKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {}}, "required": ["a"]}'
    ),
    "recursion": of_kind(ConstraintKind.JSON_SCHEMA, json.dumps(TREE)),
    "pattern and length": json_schema(
        code={"type": "string", "pattern": "^[A-Z]+-[0-9]*$", "minLength": 5, "maxLength": 900}
    ),
    "named keys": of_kind(
        ConstraintKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"x_a": {"type": "null"}}, "patternProperties": {"^x_": {"type": "integer"}},'
        ' "additionalProperties": {"type": "boolean"}}',
    ),
    "a regex": of_kind(ConstraintKind.REGEX, "[a-z ]+(-[0-9]{4})*!"),
    "brackets": of_kind(ConstraintKind.EBNF, 'root ::= "(" root* ")" | [0-9]+'),
    "sums": of_kind(ConstraintKind.EBNF, 'root ::= sum ";"\nsum ::= sum "+" [0-9]+ | [0-9]+'),
    "choices": of_kind(ConstraintKind.CHOICE, '["yes", "yesterday, all my troubles", "no way"]'),
}


def shortest_of(constraint: Constraint) -> int:
    return len(Walker(language_of(constraint)).start().completion().encode())


def run(model: HashModel, asked: list[tuple[Constraint, int]], **options: Any) -> list[Completion]:
    """What rows of these constraints and budgets end as."""
    engine = make_engine(model, **options)
    for index, (constraint, max_tokens) in enumerate(asked):
        engine.add_constraint(constraint)
        request = Request(
            request_id=str(index),
            text=f"row {index}",
            constraint_key=constraint.key,
            sampling=Sampling(max_tokens=max_tokens),
        )
        engine.add(request)
    done = finish_all(engine)
    return [done[str(index)] for index in range(len(asked))]


@pytest.mark.parametrize("worst", WORST)
def test_the_worst_model_cannot_overrun_its_budget_nor_leave_half_a_document(worst: str) -> None:
    asked = [
        (constraint, shortest_of(constraint) + slack)
        for constraint in CONSTRAINTS.values()
        for slack in (-1, 0, 1, 2, 3, 5, 8, 13, 40, 200)
        if shortest_of(constraint) + slack > 0
    ]
    for (constraint, max_tokens), completion in zip(asked, run(WorstModel(WORST[worst]), asked), strict=True):
        fault = make_validator(constraint).check(completion.text)[1]
        assert len(completion.token_ids) <= max_tokens
        if max_tokens < shortest_of(constraint):
            assert completion.finish_reason is FinishReason.LENGTH
            assert fault is not None
        else:
            assert completion.finish_reason in (FinishReason.STOP, FinishReason.CLOSED)
            assert fault is None or any(known in fault for known in LOOSE), completion.text


@settings(max_examples=60, deadline=None)
@given(schemas, st.permutations(range(32, 127)), st.integers(1, 60))
def test_a_random_document_is_closed_wherever_its_shortest_end_fits(
    schema: Any, order: list[int], max_tokens: int
) -> None:
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema))
    (completion,) = run(WorstModel(bytes(order)), [(constraint, max_tokens)])
    assert len(completion.token_ids) <= max_tokens
    assert (completion.finish_reason is FinishReason.LENGTH) == (max_tokens < shortest_of(constraint))
    if completion.finish_reason is not FinishReason.LENGTH:
        assert accepts(compile_grammar(constraint), completion.text)


def test_a_row_that_ends_in_time_is_left_alone() -> None:
    constraints = list(CONSTRAINTS.values())
    model = HashModel(favourites=b'"}]),!;', boost=6.0)
    free = run(model, [(constraint, 400) for constraint in constraints])
    budgets = [len(completion.token_ids) for completion in free]
    exact = run(model, list(zip(constraints, budgets, strict=True)))
    ended = [index for index, completion in enumerate(free) if completion.finish_reason is FinishReason.STOP]
    assert len(ended) > 8
    for index in ended:
        assert (exact[index].finish_reason, exact[index].text) == (FinishReason.STOP, free[index].text)


def test_a_closed_row_ends_so_in_every_arrangement() -> None:
    asked = [(constraint, budget) for constraint in CONSTRAINTS.values() for budget in (30, 50, 70)]

    def outcomes(**options: Any) -> list[tuple[Any, ...]]:
        return [(c.finish_reason, c.token_ids) for c in run(HashModel(), asked, **options)]

    alone = outcomes(max_num_seqs=1, prefix_cache=False)
    assert FinishReason.CLOSED in {reason for reason, _ in alone}
    assert outcomes() == alone
    assert outcomes(overlap=True) == alone
    assert outcomes(num_blocks=60, max_model_len=128) == alone


def test_a_text_that_may_end_where_its_budget_does_is_closed() -> None:
    constraint = load_constraint(ConstraintKind.REGEX, "[a-z]+")
    (completion,) = run(WorstModel(b"z"), [(constraint, 5)])
    assert (completion.text, completion.finish_reason) == ("zzzzz", FinishReason.CLOSED)


def test_a_grammar_that_cannot_be_followed_is_cut_as_before() -> None:
    hidden = 'root ::= a ";"\na ::= b a "x" | "y"\nb ::= "" | "z"'  # left-recursive once b is empty
    constraint = load_constraint(ConstraintKind.EBNF, hidden)
    (completion,) = run(WorstModel(b"zyx"), [(constraint, 6)])
    assert (completion.text, completion.finish_reason) == ("zzzzzz", FinishReason.LENGTH)


def test_labels_of_a_steered_end_are_not_called_the_models() -> None:
    done = run(WorstModel(b"x"), [(CONSTRAINTS["text and label"], budget) for budget in (40, 200)])
    assert [(c.finish_reason, c.labels) for c in done] == [(FinishReason.CLOSED, ())] * 2
    (chosen,) = run(WorstModel(b'"'), [(CONSTRAINTS["text and label"], 200)])
    assert [label.path for label in chosen.labels] == ["/label"]


def test_an_exchange_that_the_grammar_refuses_changes_nothing() -> None:
    constraint = load_constraint(ConstraintKind.REGEX, "a[bc]+d")
    grammars = Grammars(byte_tokenizer(), vocab_size=288, end_token_ids=frozenset({256}), timeout_s=9, num_threads=1)
    matcher = start_matcher(grammars, constraint)
    assert matcher.accept(ord("a"))
    assert matcher.accept(ord("b"))
    assert not exchange(matcher, (ord("b"),), (ord("c"), ord("e")))
    assert not exchange(matcher, (ord("b"),), (ord("c"),))  # whole it would not be
    assert exchange(matcher, (ord("b"),), (ord("c"), ord("d")))
    assert matcher.can_end()


def test_with_long_tokens_the_end_takes_the_fewest() -> None:
    text = Text(demo_model())
    grammars = Grammars(
        text.tokenizer, vocab_size=text.vocab_size, end_token_ids=text.eos_token_ids, timeout_s=20, num_threads=1
    )
    constraint = CONSTRAINTS["text and label"]
    matcher = start_matcher(grammars, constraint)
    closer = grammars.closer(constraint.key, 64)
    assert closer is not None
    vocabulary = closer.vocabulary
    end = vocabulary.fewest_tokens(b'", "label": "bug"}')
    assert end is not None
    assert b"".join(vocabulary.tokens[token_id] for token_id in end) == b'", "label": "bug"}'
    assert len(end) <= len(text.encode_after((), '", "label": "bug"}'))
    for token_id in (*text.encode_after((), '{"reason": "no reason at all'), *end):
        assert matcher.accept(token_id)
    assert matcher.is_at_end()
    assert vocabulary.fewest_tokens(b"\x00\n") is None


@pytest.mark.parametrize("text", [b"a\xff", b"\xe0\x80\x80", b"\xc3(", b"\xf0\x9f\x98\x80\x80", b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_have_no_end_and_break_nothing(text: bytes) -> None:
    constraint = Constraint(kind=ConstraintKind.REGEX, source="[^x]{0,9}")
    position = Position(Walker(language_of(constraint)).start()).walk(text)
    assert position.length == math.inf
    assert position.walk(b"more").length == math.inf
