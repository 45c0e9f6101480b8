"""Shared grammar states: rows that share them see what a native matcher of their own would say."""

import json
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import masks, states
from engine.grammar import Grammars
from engine.states import SharedMatcher, SharedStates
from engine.types import Matcher
from engine.vocabulary import NO_SHAPES
from schemas.constraints import GrammarEngine, grammar_engine, load_constraint
from schemas.records import Constraint, ConstraintKind
from tests.engine.fakes import END, VOCAB_SIZE, allowed_tokens, byte_tokenizer, start_matcher

CONSTRAINTS = {
    "xgrammar": (ConstraintKind.REGEX, "(cat|category|dog){1,2}x?[0-9]"),
    "llguidance": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"type": "object", "properties": {"a": {"pattern": "^[ab]+$", "maxLength": 3}}, "required": ["a"]}),
    ),
}
ENDS = frozenset({END})
TOKENS = [*b'0123}catdogeryx{": b', END]


def make_grammars() -> Grammars:
    return Grammars(byte_tokenizer(), vocab_size=VOCAB_SIZE, end_token_ids=ENDS, timeout_s=20, num_threads=1)


@pytest.fixture(scope="module", params=CONSTRAINTS)
def start(request: pytest.FixtureRequest) -> Callable[[], Matcher]:
    kind, source = CONSTRAINTS[request.param]
    return start_matcher(make_grammars(), load_constraint(kind, source))._states.start


def says(matcher: Matcher) -> tuple[object, ...]:
    longer = [matcher.allows_longer(token) for token in TOKENS[:4]]
    return matcher.is_terminated, matcher.can_end(), matcher.is_at_end(), matcher.forced_text(), longer


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_that_share_states_see_what_a_native_matcher_says(
    start: Callable[[], Matcher], data: st.DataObject
) -> None:
    shared = SharedStates(start, ENDS)
    rows = [(SharedMatcher(shared), start(), [0]) for _ in range(3)]
    for _ in range(data.draw(st.integers(1, 40))):
        matcher, native, count = data.draw(st.sampled_from(rows))
        if count[0] and data.draw(st.integers(0, 4)) == 0:
            num_tokens = data.draw(st.integers(1, count[0]))
            matcher.rollback(num_tokens)
            native.rollback(num_tokens)
            count[0] -= num_tokens
        elif not native.is_terminated:
            token = data.draw(st.sampled_from(TOKENS))
            forced = native.forced_text()
            token = forced.encode()[0] if forced and data.draw(st.booleans()) else token
            took = native.accept(token)
            assert matcher.accept(token) == took
            count[0] += took
        assert says(matcher) == says(native)


def test_a_second_row_finds_what_the_first_one_found(start: Callable[[], Matcher]) -> None:
    num_started = 0

    def counted() -> Matcher:
        nonlocal num_started
        num_started += 1
        return start()

    shared = SharedStates(counted, ENDS)
    text = _some_text(start())
    for _ in range(len(text) + 2):  # a row after which nothing more is to be found
        matcher = SharedMatcher(shared)
        assert all(map(matcher.accept, text))
    before = num_started
    matcher = SharedMatcher(shared)
    assert all(map(matcher.accept, text))
    assert num_started == before


def test_a_grammar_of_many_texts_keeps_a_bounded_number_of_states(
    start: Callable[[], Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "MAX_STATES", 4)
    shared, text = SharedStates(start, ENDS), _some_text(start())
    for _ in range(20):
        matcher, native = SharedMatcher(shared), start()
        for token in text:
            assert matcher.accept(token)
            assert native.accept(token)
            assert says(matcher) == says(native)
            assert shared.num_states <= 4


def _some_text(matcher: Matcher) -> list[int]:
    """The tokens of one whole text."""
    tokens: list[int] = []
    while not matcher.is_terminated:
        token = next(token for token in [END, *TOKENS] if matcher.accept(token))
        tokens.append(token)
    return tokens


SCHEMAS: dict[str, Any] = {
    "strings": {
        "type": "object",
        "properties": {
            "why": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["why", "n"],
        "additionalProperties": False,
    },
    "numbers": {"type": "array", "items": {"type": "number", "exclusiveMinimum": -1.5}, "maxItems": 3},
    "patterns": {
        "type": "object",
        "properties": {"a": {"pattern": "^[ab\u00e9]+$", "maxLength": 5}},
        "required": ["a"],
    },
    "lists": {"type": "array", "items": {"anyOf": [{"type": "array", "maxItems": 2}, {"enum": ["x", "yz"]}]}},
    "anything": {},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_on_random_walks_rows_see_what_a_fresh_matcher_says(schema: object) -> None:
    draw = random.Random(0)
    grammars = make_grammars()
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    start = start_matcher(grammars, constraint)._states.start
    num_asked = 0
    for _ in range(10):
        rows = [(start_matcher(grammars, constraint), list[int]()) for _ in range(6)]
        for _ in range(14):
            rows = [(row, tokens) for row, tokens in rows if not row.is_terminated]
            num_asked += len(rows)
            masks = allowed_tokens(grammars, [None, *(row for row, _ in rows)])[1:] if rows else []
            for (row, tokens), allowed in zip(rows, masks, strict=True):
                fresh = start()
                assert all(map(fresh.accept, tokens))
                assert allowed == {token for token in range(END + 1) if fresh.accept(token) and not fresh.rollback(1)}
                assert says(row) == says(fresh)
                token = draw.choice(sorted(allowed) if draw.random() < 0.9 else range(END + 1))
                assert row.accept(token) == (token in allowed)
                tokens += [token] if token in allowed else []
                if draw.random() < 0.1 and tokens:
                    row.rollback(1)
                    tokens.pop()
    assert len(grammars._masks._kept) < num_asked / 2, "most rows find the mask of a row that was there before"


def test_a_full_table_of_masks_is_emptied_and_one_too_small_for_a_batch_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TABLE_BYTES", 4 * (VOCAB_SIZE // 32) * 5)
    grammars, constraint = make_grammars(), load_constraint(ConstraintKind.REGEX, "abcdefgh[0-9]")
    for num_rows in (1, 2, 3, 4, 3, 8, 1):
        rows = [start_matcher(grammars, constraint) for _ in range(num_rows)]
        for length, row in enumerate(rows):
            assert all(map(row.accept, b"abcdefgh"[:length]))
        assert allowed_tokens(grammars, rows) == [{token} for token in b"abcdefgh"[:num_rows]]


def test_both_grammar_engines_are_walked() -> None:
    constraints = [load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS.values()]
    assert {grammar_engine(constraint) for constraint in constraints} == set(GrammarEngine)


class OnePlace:
    """Places of somebody who takes all texts for one."""

    def first(self) -> Hashable:
        return "here"

    def after(self, place: Any, token_id: int) -> Hashable:
        return place

    def shapes(self, place: Any) -> dict[int, int]:
        return NO_SHAPES

    def is_alike(self, place: Any, token_id: int) -> bool:
        raise AssertionError("each token has a name of its own")

    def spellings(self, place: Any, context: tuple[int, ...]) -> None:
        return None


def test_tokens_of_one_shape_share_an_edge_and_others_do_not() -> None:
    grammars = make_grammars()
    constraint = Constraint(kind=ConstraintKind.REGEX, source=r"[a-y0-4]{1,9}(z[0-9]){0,2}")
    first, second, third, fourth = (start_matcher(grammars, constraint) for _ in range(4))
    allowed_tokens(grammars, [first])
    assert first.accept(ord("a"))
    root = second.state
    assert list(root.children) == [root.shapes[ord("a")]]
    assert second.accept(ord("y"))
    assert second.state is first.state
    assert not fourth.accept(ord("z"))
    assert third.accept(ord("4"))
    allowed_tokens(grammars, [third])
    assert third.accept(ord("z"))
    assert third.state is not first.state
    assert not third.accept(ord("z"))
    assert third.accept(ord("7"))


def test_a_row_that_wrong_places_led_astray_ends_alone() -> None:
    grammars = make_grammars()
    start = start_matcher(grammars, Constraint(kind=ConstraintKind.REGEX, source="ab(c|d)"))._states.start
    states = SharedStates(start, ENDS, OnePlace())
    honest, astray = SharedMatcher(states), SharedMatcher(states)
    assert allowed_tokens(grammars, [honest]) == [{ord("a")}]
    assert astray.accept(ord("a"))
    assert astray.accept(ord("a"))
    assert astray.native is None
    assert not astray.can_end()
    assert not astray.is_at_end()
    assert allowed_tokens(grammars, [astray, honest]) == [set(), {ord("a")}]
    assert not astray.accept(ord("a"))
