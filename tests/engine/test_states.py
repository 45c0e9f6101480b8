"""Shared grammar states: rows that share them see what a native matcher of their own would say."""

import json
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import states
from engine.grammar import Grammars
from engine.states import SharedMatcher, SharedStates
from engine.types import Matcher
from schemas.constraints import load_constraint
from schemas.records import Constraint, ConstraintKind
from tests.engine.fakes import END, VOCAB_SIZE, byte_tokenizer, start_matcher

CONSTRAINTS = {
    "xgrammar": (ConstraintKind.REGEX, "(cat|category|dog){1,2}x?[0-9]"),
    "llguidance": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"type": "object", "properties": {"a": {"pattern": "^[ab]+$", "maxLength": 3}}, "required": ["a"]}),
    ),
}
TOKENS = [*b'0123}catdogeryx{": b', END]


@pytest.fixture(scope="module", params=CONSTRAINTS)
def start(request: pytest.FixtureRequest) -> Callable[[], Matcher]:
    grammars = Grammars(
        byte_tokenizer(), vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END}), timeout_s=20, num_threads=1
    )
    kind, source = CONSTRAINTS[request.param]
    return start_matcher(grammars, load_constraint(kind, source))._states.start


def says(matcher: Matcher) -> tuple[object, ...]:
    longer = [matcher.allows_longer(token) for token in TOKENS[:4]]
    return matcher.is_terminated, matcher.is_at_end(), matcher.forced_text(), longer


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_that_share_states_see_what_a_native_matcher_says(
    start: Callable[[], Matcher], data: st.DataObject
) -> None:
    shared = SharedStates(start)
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

    shared = SharedStates(counted)
    text = _some_text(start())
    for _ in range(len(text) + 2):  # a row after which nothing more is to be found
        matcher = SharedMatcher(shared)
        assert all(map(matcher.accept, text))
    before = num_started
    matcher = SharedMatcher(shared)
    assert all(map(matcher.accept, text))
    assert matcher.state is not None
    assert num_started == before


def test_a_grammar_of_many_texts_keeps_a_bounded_number_of_states(
    start: Callable[[], Matcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "MAX_STATES", 4)
    shared, text = SharedStates(start), _some_text(start())
    for _ in range(20):
        matcher = SharedMatcher(shared)
        assert all(map(matcher.accept, text))
    assert shared.num_states == 4
    assert matcher.state is None


def _some_text(matcher: Matcher) -> list[int]:
    """The tokens of one whole text."""
    tokens: list[int] = []
    while not matcher.is_terminated:
        token = next(token for token in [END, *TOKENS] if matcher.accept(token))
        tokens.append(token)
    return tokens


def test_masks_of_shared_states_are_those_of_native_matchers() -> None:
    grammars = Grammars(
        byte_tokenizer(), vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END}), timeout_s=20, num_threads=1
    )
    constraint = Constraint(kind=ConstraintKind.REGEX, source="(cat|category|dog){1,2}x?[0-9]")
    first = start_matcher(grammars, constraint)
    rows = [first, *(start_matcher(grammars, constraint) for _ in range(7))]
    for text in ("cat0", "categor", "do", "dogcatx", "catcat", "c", ""):
        rows.append(start_matcher(grammars, constraint))
        assert all(map(rows[-1].accept, text.encode()))
    for _ in range(3):
        masks = grammars.fill([None, *rows])
        assert masks is not None
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little")
        assert bits[0].all()
        for row, matcher in zip(bits[1:], rows, strict=True):
            allowed = [
                token for token in range(END + 1) if matcher.native.accept(token) and not matcher.native.rollback(1)
            ]
            assert np.flatnonzero(row).tolist() == allowed


FREE = {
    "strings": {
        "type": "object",
        "properties": {
            "why": {"type": "string", "maxLength": 6},
            "n": {"type": "integer", "maximum": 99, "minimum": 0},
        },
        "required": ["why", "n"],
        "additionalProperties": False,
    },
    "patterns": {
        "type": "object",
        "properties": {"a": {"pattern": "^[ab\u00e9]+$", "maxLength": 5}},
        "required": ["a"],
    },
    "lists": {"type": "array", "items": {"anyOf": [{"type": "array", "maxItems": 2}, {"enum": ["x", "yz"]}]}},
}


@pytest.mark.parametrize("schema", FREE.values(), ids=FREE)
def test_rows_at_one_place_in_free_text_share_a_mask_that_is_their_own(schema: object) -> None:
    draw = random.Random(0)
    grammars = Grammars(
        byte_tokenizer(), vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END}), timeout_s=20, num_threads=1
    )
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
    start_matcher(grammars, constraint)
    num_filled, num_asked = 0, 0

    def count(matchers: list[Matcher], filled: torch.Tensor) -> None:
        nonlocal num_filled
        num_filled += len(matchers)
        grammars._fill_native(matchers, filled)

    grammars._masks._fill_native = count
    for _ in range(12):
        rows = [start_matcher(grammars, constraint) for _ in range(6)]
        for _ in range(14):
            rows = [row for row in rows if not row.is_terminated]
            if not rows:
                break
            num_asked += len(rows)
            masks = grammars.fill(rows)
            assert masks is not None
            alone = torch.empty((len(rows), -(-(END + 1) // 32)), dtype=torch.int32)
            grammars._fill_native([row.native for row in rows], alone)
            wanted, got = (
                np.unpackbits(each.numpy().view(np.uint8), axis=1, bitorder="little")[:, : END + 1]
                for each in (alone, masks)
            )
            assert (wanted == got).all()
            for row, allowed in zip(rows, got, strict=True):
                assert row.accept(draw.choice(np.flatnonzero(allowed).tolist()))
                if draw.random() < 0.1 and not row.is_terminated:
                    row.rollback(1)
    assert num_filled < num_asked / 3, "most rows find the mask of a row that was there before"
