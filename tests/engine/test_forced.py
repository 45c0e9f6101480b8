"""Text that the grammar forces: never drawn, tokenised as the tokenizer would, and no answer changes by it."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.forced import ForcedText
from engine.grammar import Grammars
from schemas.records import Constraint, ConstraintKind, FinishReason, Request, Sampling
from tests.demo_model import demo_model
from tests.engine.fakes import HashModel, make_engine, run_all, start_matcher

ROUTE = json.dumps(
    {
        "type": "object",
        "properties": {"route": {"enum": ["bill", "bug", "other"]}},
        "required": ["route"],
        "additionalProperties": False,
    }
)
REASON = json.dumps(
    {
        "type": "object",
        "properties": {"why": {"type": "string", "minLength": 1, "maxLength": 4}, "urgent": {"type": "boolean"}},
        "required": ["why", "urgent"],
        "additionalProperties": False,
    }
)
CONSTRAINTS = [
    Constraint(kind=ConstraintKind.JSON_SCHEMA, source=ROUTE),
    Constraint(kind=ConstraintKind.JSON_SCHEMA, source=REASON),
    Constraint(kind=ConstraintKind.REGEX, source="ab(cde|cdf)gh[0-9]"),
    Constraint(kind=ConstraintKind.CHOICE, source='["cat", "category", "dog"]'),
]


def requests(count: int, **sampling: Any) -> list[Request]:
    return [
        Request(
            request_id=str(i),
            text=f"the same start, then row {i}",
            seed=i,
            constraint_key=CONSTRAINTS[i % len(CONSTRAINTS)].key,
            sampling=Sampling(**{"max_tokens": 60, "temperature": (i % 3) / 2, **sampling}),
        )
        for i in range(count)
    ]


def answers(*, force_text: bool, wanted: list[Request], **settings: Any) -> dict[str, tuple[Any, ...]]:
    engine = make_engine(**settings)
    for constraint in CONSTRAINTS:
        engine.add_constraint(constraint)
    chosen = [replace(row, sampling=replace(row.sampling, force_text=force_text)) for row in wanted]
    done = run_all(engine, chosen)
    return {name: (c.text, c.finish_reason, c.token_ids) for name, c in done.items()}


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 40, "max_model_len": 100}], ids=str
)
def test_forcing_changes_no_answer(settings: dict[str, Any]) -> None:
    wanted = requests(24)
    forced = answers(force_text=True, wanted=wanted, **settings)
    assert forced == answers(force_text=False, wanted=wanted)
    assert {reason for _, reason, _ in forced.values()} == {FinishReason.STOP}


@pytest.mark.parametrize("max_tokens", [1, 3, 10, 13])
def test_a_budget_cuts_forced_text_where_it_would_cut_drawn_text(max_tokens: int) -> None:
    wanted = requests(8, max_tokens=max_tokens)
    assert answers(force_text=True, wanted=wanted) == answers(force_text=False, wanted=wanted)


def test_a_stop_string_ends_forced_text() -> None:
    wanted = requests(8, stop=("ro", "bcd"))
    forced = {name: text for name, (text, _, _) in answers(force_text=True, wanted=wanted).items()}
    assert forced == {name: text for name, (text, _, _) in answers(force_text=False, wanted=wanted).items()}


def test_a_label_costs_one_row_a_branching_point_and_nothing_after_the_last() -> None:
    model = HashModel()
    engine = make_engine(model)
    engine.add_constraint(CONSTRAINTS[0])
    prompt = "hello"
    request = Request(request_id="a", text=prompt, constraint_key=CONSTRAINTS[0].key, sampling=Sampling(max_tokens=60))
    (completion,) = run_all(engine, [request]).values()
    label = json.loads(completion.text)["route"]
    before = len(prompt) + len('{"route": "')
    branches = {"bill": [before, 1], "bug": [before, 1], "other": [before]}  # a "b" leaves bill and bug
    assert model.num_rows == branches[label]
    assert engine.stats.num_forced_tokens == completion.text.__len__() - len(branches[label])


def test_an_answer_without_a_choice_costs_no_step() -> None:
    model = HashModel()
    engine = make_engine(model)
    constraint = Constraint(kind=ConstraintKind.CHOICE, source='["yes"]')
    engine.add_constraint(constraint)
    (completion,) = run_all(engine, [Request(request_id="a", text="hello", constraint_key=constraint.key)]).values()
    assert (completion.text, completion.finish_reason, model.num_rows) == ("yes", FinishReason.STOP, [])


# With the demo model's tokenizer, whose tokens are longer than a byte.


@pytest.fixture(scope="module")
def text() -> Any:
    files = demo_model()
    from engine.text import Text

    return Text(files)


@pytest.fixture(scope="module")
def grammars(text: Any) -> Grammars:
    return Grammars(text.tokenizer, vocab_size=49152, end_token_ids=text.eos_token_ids, timeout_s=20, num_threads=1)


def test_forced_tokens_are_the_canonical_ones_up_to_an_open_merge(text: Any, grammars: Grammars) -> None:
    matcher = start_matcher(grammars, CONSTRAINTS[0])
    forced = ForcedText(text).advance(matcher, [], 100)
    whole = text.encode_after((), '{"route": "other"}')
    assert 0 < len(forced) < len(whole)
    assert whole[: len(forced)] == forced
    rest = text.decode(whole[len(forced) :])
    assert all(matcher.accept(token) for token in whole[len(forced) :]), f"cannot go on with {rest!r}"


@settings(max_examples=40)  # each compiles a grammar for 49,152 tokens
@given(labels=st.lists(st.text("abAB c_-é", min_size=1, max_size=8), min_size=1, max_size=4, unique=True))
def test_every_label_stays_reachable_with_its_canonical_tokens(
    text: Any, grammars: Grammars, labels: list[str]
) -> None:
    constraint = Constraint(kind=ConstraintKind.CHOICE, source=json.dumps(labels))
    for label in labels:
        matcher, tokens = start_matcher(grammars, constraint), list(text.encode_after((), label))
        output: list[int] = []
        while not matcher.is_at_end():
            output += ForcedText(text).advance(matcher, output, 100)
            if text.decode(output) == label and not matcher.forced_text():
                break  # another label goes on from here
            assert tokens[: len(output)] == output
            assert matcher.accept(tokens[len(output)])
            output.append(tokens[len(output)])
        assert text.decode(output) == label


def test_the_context_decides_how_forced_text_is_cut(text: Any) -> None:
    (context,) = text.encode_after((), "bill")
    assert text.decode(text.encode_after((context,), 'ing"}')) == 'ing"}'
    assert text.encode_after((), 'ing"}') == text.encode_after((context,), 'ing"}')  # would merge: on its own
