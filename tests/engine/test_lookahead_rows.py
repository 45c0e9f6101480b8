"""Whatever a part of the model foresees, rows of every kind end as they would without it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import pytest

from engine.lookahead import Foreseen
from engine.loop import Engine
from engine.types import Sequence as Row
from schemas.records import Completion, Constraint, FinishReason, Request, Sampling
from tests.engine.fakes import END, HashModel, hash_tokens, make_engine, run_all
from tests.engine.test_closing import CONSTRAINTS as CLOSABLE
from tests.engine.test_closing import shortest_of
from tests.engine.test_labels import CHOICE, SCHEMA
from tests.engine.test_lookahead import Silent
from tests.engine.test_loop import CONSTRAINTS, mixed_requests
from tests.engine.test_thinking import ASKED, LIKELY, ROUTE
from tests.engine.test_thinking import make_engine as thinking_engine

TALKATIVE = HashModel(favourites=[*b'abcxyz"}] ', END], boost=5.0)


class Prophet:
    """A lookahead that has seen all answers; some of its guesses are wrong, and it is as sure of those."""

    def __init__(self, answers: dict[str, Completion], block_size: int) -> None:
        self.answers, self.block_size = answers, block_size

    def num_slots(self, num_tokens: int) -> int:
        return 9

    def follow(self, runs: Any, drawn: Any) -> None:
        assert runs

    def guess(self, ahead: Any, places: Sequence[tuple[Row, int]], num_tokens: int) -> list[Foreseen]:
        return [self.foresee(sequence, num_tokens) for sequence, _ in places]

    def foresee(self, sequence: Row, num_tokens: int) -> Foreseen:
        written = len(sequence.token_ids)
        assert sequence.num_computed == written - 1, "a drafter finds the states of all tokens but the last"
        assert len(sequence.block_ids) * self.block_size >= written + self.num_slots(num_tokens)
        answer = self.answers[sequence.request.request_id].token_ids
        assert answer[: sequence.num_output] == tuple(sequence.output_ids)
        seed = hash_tokens(list(sequence.token_ids))
        following = [
            seed % 250 if hash_tokens([seed, place]) % 100 < 15 else token_id
            for place, token_id in enumerate((*answer[sequence.num_output :], seed % 99, END)[:num_tokens])
        ]
        return Foreseen(tuple(following), (0.9,) * len(following))


@dataclass(frozen=True)
class Kind:
    """Rows of one kind, what they need, and what shows that they are of that kind."""

    requests: list[Request]
    constraints: list[Constraint]
    shows: Callable[[list[Completion]], bool]
    make_engine: Callable[..., Engine] = make_engine
    model: HashModel = TALKATIVE


def rows(constraints: Sequence[Constraint | None], **sampling: Any) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            text=f"a row {index % 7}",
            seed=index,
            constraint_key=constraint.key if constraint else None,
            sampling=Sampling(**{"max_tokens": 40, "temperature": index % 3 / 2, "logprobs": True, **sampling}),
        )
        for index, constraint in enumerate(constraints)
    ]


def closing_rows() -> list[Request]:
    budgets = [(constraint, slack) for constraint in CLOSABLE.values() for slack in (0, 1, 3, 8, 21)]
    asked = rows([constraint for constraint, _ in budgets])
    return [
        msgspec.structs.replace(
            request, sampling=Sampling(max_tokens=shortest_of(constraint) + slack, temperature=0.7, logprobs=True)
        )
        for request, (constraint, slack) in zip(asked, budgets, strict=True)
    ]


def golden_rows() -> list[Request]:
    return [msgspec.structs.replace(request, golden_token_ids=tuple(range(50, 90))) for request in rows([None] * 6)]


def ended(*reasons: FinishReason) -> Callable[[list[Completion]], bool]:
    return lambda done: set(reasons) <= {completion.finish_reason for completion in done}


KINDS = {
    "mixed": Kind(mixed_requests(96), CONSTRAINTS, ended(FinishReason.STOP, FinishReason.LENGTH), model=HashModel()),
    "thinking": Kind(ASKED, [ROUTE], lambda done: any(each.reasoning for each in done), thinking_engine, LIKELY),
    "closing": Kind(closing_rows(), list(CLOSABLE.values()), ended(FinishReason.CLOSED)),
    "stop strings": Kind(rows([None] * 24, stop=("ab", "z", "xx")), [], ended(FinishReason.STOP)),
    "forced text": Kind(rows([SCHEMA] * 12, max_tokens=200), [SCHEMA], ended(FinishReason.STOP)),
    "text that is drawn": Kind(
        rows([SCHEMA] * 12, force_text=False, max_tokens=200), [SCHEMA], ended(FinishReason.STOP)
    ),
    "labels": Kind(
        rows([SCHEMA, CHOICE] * 6, top_labels=3, max_tokens=200),
        [SCHEMA, CHOICE],
        lambda done: all(each.labels for each in done),
    ),
    "one token": Kind(rows([None, CHOICE] * 6, max_tokens=1), [CHOICE], lambda done: True),
    "golden": Kind(golden_rows(), [], lambda done: all(each.token_ids[0] == 50 for each in done)),
}


def what_counts(completion: Completion) -> Completion:
    """All that must not hang on drafts."""
    logprobs = completion.logprobs and tuple(round(logprob, 4) for logprob in completion.logprobs)
    zeros = {"num_draft_tokens": 0, "num_accepted_tokens": 0, "num_cached_tokens": 0, "seconds": 0.0}
    return msgspec.structs.replace(completion, logprobs=logprobs, first_token_s=None, **zeros)


def ask(kind: Kind, answers: dict[str, Completion] | None, **settings: Any) -> tuple[dict[str, Completion], Any]:
    engine = kind.make_engine(kind.model, **settings)
    for constraint in kind.constraints:
        engine.add_constraint(constraint)
    if answers is not None:
        engine._drafter._source = Silent()
        engine._replica.lookahead = Prophet(answers, 4)  # type: ignore[assignment]
    return {name: what_counts(done) for name, done in run_all(engine, kind.requests).items()}, engine.stats


@cache
def plain_answers(name: str) -> dict[str, Completion]:
    return ask(KINDS[name], None, num_draft_tokens=0)[0]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("is_tight", [False, True], ids=["wide", "chunked and preempting"])
def test_what_is_foreseen_changes_no_row(name: str, is_tight: bool) -> None:
    kind, plain = KINDS[name], plain_answers(name)
    tight = {"max_num_seqs": 24, "max_num_batched_tokens": 48, "num_blocks": 150} if is_tight else {}
    drafted, stats = ask(kind, plain, num_draft_tokens=6, **tight)
    assert drafted == plain
    assert kind.shows(list(plain.values()))
    assert stats.num_accepted_tokens == sum(stats.accepted_by_position)
    assert len(stats.drafts_by_position) <= 6
    if not is_tight:  # else forced text may leave no row for them
        assert (stats.num_accepted_tokens > 0) == (name != "one token")
