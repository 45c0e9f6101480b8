"""Drafts change no completion, whatever they guess; what is right saves steps."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.device import select_device
from engine.draft import NUM_DRAFT_TOKENS, DraftLimit, Guess, PromptLookup, resolve_num_drafts
from engine.types import Sequence
from schemas.errors import SettingsError
from schemas.records import Constraint, ConstraintKind, FinishReason
from schemas.settings import EngineSettings
from tests.engine.fakes import HashModel, hash_tokens, make_engine, make_sequence, run_all
from tests.engine.test_loop import CONSTRAINTS, alone, answer, mixed_requests, request
from tests.engine.test_thinking import ASKED, LIKELY, ROUTE
from tests.engine.test_thinking import make_engine as thinking_engine

NUM_ROWS = 192


class KnowsTheAnswers:
    """A source that has seen all outputs; of its guesses, some that hang on all tokens so far are wrong."""

    def __init__(self, answers: dict[str, Any], wrong_share: float = 0.2) -> None:
        self.answers, self.wrong_share = answers, wrong_share

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        following = list(self.answers[sequence.request.request_id][2][sequence.num_output :][:limit])
        seed = hash_tokens(list(sequence.token_ids))
        for place in range(len(following)):
            if hash_tokens([seed, place]) % 100 < 100 * self.wrong_share:
                following[place] = seed % 250
        return Guess(following)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
        {"max_num_seqs": 48, "max_num_batched_tokens": 150, "num_draft_tokens": 3},
        {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_blocks": 60, "max_model_len": 128},
        {"max_num_seqs": 64, "prefix_cache": False, "overlap": True, "block_size": 8},
        {"max_num_seqs": 32, "num_blocks": 60, "max_model_len": 120, "overlap": True},
    ],
    ids=["wide", "chunked", "preempting", "overlapped", "overlapped-preempting"],
)
def test_drafts_of_any_quality_change_no_completion(settings: dict[str, Any]) -> None:
    source = KnowsTheAnswers(alone(256))
    engine = make_engine(draft_source=source, **{"num_draft_tokens": 6, **settings})
    for constraint in CONSTRAINTS:
        engine.add_constraint(constraint)
    requests = mixed_requests(NUM_ROWS)
    completions = run_all(engine, requests)
    done = {name: answer(completion) for name, completion in completions.items()}
    assert done == {r.request_id: alone(256)[r.request_id] for r in requests}
    stats = engine.stats
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    counted = [(each.num_draft_tokens, each.num_accepted_tokens) for each in completions.values()]
    assert list(map(sum, zip(*counted, strict=True))) == [stats.num_draft_tokens, stats.num_accepted_tokens]
    assert (sum(stats.drafts_by_position), sum(stats.accepted_by_position)) == (
        stats.num_draft_tokens,
        stats.num_accepted_tokens,
    )
    assert stats.num_output_tokens - stats.num_forced_tokens > stats.num_draws
    assert (stats.num_preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize("overlap", [False, True])
def test_right_guesses_save_steps_and_spend_no_row(overlap: bool) -> None:
    answers = {name: answer(done) for name, done in run_all(make_engine(), long_rows()).items()}
    model = HashModel()
    source = KnowsTheAnswers(answers, wrong_share=0.0)
    engine = make_engine(model, draft_source=source, num_draft_tokens=4, overlap=overlap, prefix_cache=False)
    assert {name: answer(done) for name, done in run_all(engine, long_rows()).items()} == answers
    assert engine.stats.num_accepted_tokens == engine.stats.num_draft_tokens
    assert engine.stats.num_output_tokens / engine.stats.num_draws > 3
    assert len(model.num_rows) < 20
    if not overlap:
        assert sum(model.num_rows) == sum(8 + 40 - 1 for _ in answers)  # and no row for a last token


def long_rows() -> list[Any]:
    return [request(i, f"row {i:04}", max_tokens=40, ignore_eos=True, temperature=i % 2) for i in range(8)]


def test_drafts_change_no_thought_and_no_answer_after_it() -> None:
    def run(num_draft_tokens: int, overlap: bool) -> tuple[list[tuple[object, ...]], int]:
        engine = thinking_engine(LIKELY, num_draft_tokens=num_draft_tokens, overlap=overlap)
        engine.add_constraint(ROUTE)
        done = run_all(engine, ASKED)
        return [answer(done[each.request_id]) for each in ASKED], engine.stats.num_accepted_tokens

    plain, none = run(0, overlap=False)
    assert none == 0
    for overlap in (False, True):
        drafted, some = run(5, overlap)
        assert drafted == plain
        assert some > 0


class Echo(HashModel):
    """Goes on as it did ``period`` tokens ago, but for some places."""

    period = 7

    def forward(self, batch: Any, cache: torch.Tensor) -> torch.Tensor:
        hidden = super().forward(batch, cache)
        before = []
        for row in batch.logits_rows.tolist():
            sequence = int(torch.searchsorted(batch.attention.query_starts, row, right=True)) - 1
            position = int(batch.positions[row]) + 1 - self.period
            before.append(int(cache[batch.attention.block_table[sequence]].flatten()[position]))
        return torch.stack((hidden, torch.tensor(before, dtype=torch.int64)), dim=1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden[:, 0])
        logits[torch.arange(len(hidden)), hidden[:, 1]] += 9.0
        return logits


def test_a_model_that_copies_gets_several_tokens_a_step() -> None:
    constraint = Constraint(
        kind=ConstraintKind.JSON_SCHEMA,
        source=json.dumps({"type": "array", "items": {"enum": ["abc", "abd", "xyz"]}, "minItems": 9, "maxItems": 12}),
    )
    requests = [
        request(i, f"{i}: one two {i}: one two ", max_tokens=120, key=constraint.key if i % 2 else None)
        for i in range(12)
    ]

    def run(**settings: Any) -> tuple[dict[str, Any], Any]:
        engine = make_engine(Echo(), **settings)
        engine.add_constraint(constraint)
        return {name: answer(done) for name, done in run_all(engine, requests).items()}, engine.stats

    plain, counted = run()
    drafted, stats = run(num_draft_tokens=5)
    assert drafted == plain
    assert FinishReason.STOP in {each[0] for each in plain.values()}
    assert counted.num_draft_tokens == 0
    assert stats.num_accepted_tokens / stats.num_draft_tokens > 0.5
    assert stats.num_output_tokens / stats.num_draws > 1.5
    assert stats.num_steps < counted.num_steps


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(tokens, st.integers(1, 6))
def test_the_guess_is_what_followed_the_longest_match(token_ids: list[int], limit: int) -> None:
    guess = PromptLookup().guess(make_sequence(token_ids), limit)
    matches = [
        (length, end)
        for end in range(1, len(token_ids))
        for length in range(1, 9)
        if length <= end and token_ids[end - length : end] == token_ids[-length:]
    ]
    if not matches:
        assert not guess.token_ids
        return
    length, end = max(matches)
    expected = token_ids[:]
    for offset in range(limit):
        expected.append(expected[end + offset])
    assert (list(guess.token_ids), guess.kind) == (expected[len(token_ids) :], length)


def test_the_setting_is_the_number_unless_it_is_left_open() -> None:
    cpu = select_device(EngineSettings(device="cpu"))
    assert resolve_num_drafts(EngineSettings(), cpu) == DraftLimit(NUM_DRAFT_TOKENS, is_measured=True)
    assert resolve_num_drafts(EngineSettings(), torch.device("cuda")).num_tokens == 0
    assert resolve_num_drafts(EngineSettings(num_draft_tokens=3), cpu) == DraftLimit(3, is_measured=False)
    assert resolve_num_drafts(EngineSettings(context_parallel=2), cpu).num_tokens == 0
    with pytest.raises(SettingsError, match=r"num_draft_tokens 3 with engine\.context_parallel 2"):
        resolve_num_drafts(EngineSettings(num_draft_tokens=3, context_parallel=2), cpu)


def test_a_fork_goes_its_own_way() -> None:
    """Whether its places are followed or not, and for both grammar engines."""
    from engine.grammar import Grammars
    from tests.engine.fakes import END, ByteText, start_matcher

    grammars = Grammars(
        ByteText().tokenizer, vocab_size=288, end_token_ids=frozenset({END}), timeout_s=20.0, num_threads=1
    )
    open_object = Constraint(
        kind=ConstraintKind.JSON_SCHEMA,
        source=json.dumps(
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[ab]*$", "maxLength": 5}}}
        ),
    )
    for constraint, text in (
        (CONSTRAINTS[1], b"abcdef-12"),
        (CONSTRAINTS[2], b"<x(y)((z))>"),
        (open_object, b'{"a": "abab"}'),
    ):
        matcher = start_matcher(grammars, constraint)
        for place, token in enumerate(text):
            fork = matcher.fork()
            assert all(fork.accept(each) for each in text[place:])
            fork.rollback(len(text) - place)
            assert fork.accept(token)
            assert not matcher.accept(ord("~"))
            assert matcher.accept(token)
            masks = grammars.fill([fork, matcher])
            assert masks is not None
            assert torch.equal(*masks.bits[masks.rows.long()])
            assert (fork.can_end(), fork.is_at_end(), fork.forced_text()) == (
                matcher.can_end(),
                matcher.is_at_end(),
                matcher.forced_text(),
            )
