"""The whole engine over a model that hashes its paged cache: what a row gets never depends on its neighbours."""

import json
import re
from functools import cache
from typing import Any

import pytest
import torch

from engine.device import resolve_sizes, select_device
from engine.grammar import CHARS_PER_CONSTRAINT
from engine.loop import Engine
from schemas.constraints import make_validator
from schemas.errors import EngineError, SettingsError
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, Message, Request, Sampling
from schemas.settings import EngineSettings
from tests.engine.fakes import END, VOCAB_SIZE, HashModel, finish_all, make_engine, run_all

CONSTRAINTS = [
    Constraint(
        kind=ConstraintKind.JSON_SCHEMA,
        source=json.dumps(
            {
                "type": "object",
                "properties": {"reason": {"type": "string", "maxLength": 5}, "label": {"enum": ["billing", "bug"]}},
                "required": ["reason", "label"],
                "additionalProperties": False,
            }
        ),
    ),
    Constraint(kind=ConstraintKind.REGEX, source="[a-f]{3,9}(-[0-9]{2})?"),
    Constraint(kind=ConstraintKind.EBNF, source='root ::= "<" item* ">"\nitem ::= [xyz] | "(" item ")"'),
    Constraint(kind=ConstraintKind.CHOICE, source='["cat", "category", "dog"]'),
]
SAMPLINGS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    for temperature, top_k, top_p, min_p, penalty in [
        (0.0, 0, 1.0, 0.0, 1.0),
        (0.0, 0, 1.0, 0.0, 1.4),
        (0.0, 5, 0.5, 0.1, 0.8),
        *(
            (t, k, p, m, r)
            for t in (0.6, 1.2)
            for k in (0, 7)
            for p, m, r in [(1.0, 0, 1), (0.8, 0, 1), (1.0, 0.05, 1)]
        ),
        *((1.0, k, p, 0.02, r) for k in (0, 30) for p in (0.9, 0.7) for r in (1.0, 1.3)),
    ]
][:20]


def request(
    request_id: object, text: str = "a prompt", *, seed: int = 0, key: str | None = None, **sampling: Any
) -> Request:
    return Request(
        request_id=str(request_id),
        text=text,
        seed=seed,
        constraint_key=key,
        sampling=Sampling(**{"max_tokens": 12, "logprobs": True, **sampling}),
    )


def mixed_requests(count: int, max_tokens: int = 24) -> list[Request]:
    """Rows of mixed length, five constraint kinds and twenty sampling settings; some share a long start."""
    requests = []
    for i in range(count):
        base = SAMPLINGS[i % len(SAMPLINGS)]
        sampling = Sampling(
            max_tokens=1 + (i * 7) % max_tokens,
            logprobs=True,
            **{name: getattr(base, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
        )
        key = CONSTRAINTS[i % 5 - 1].key if i % 5 else None
        text = ("the shared start of many prompts " if i % 3 else "") + "row " * (i % 11) + str(i)
        requests.append(Request(request_id=str(i), text=text, sampling=sampling, seed=i * 101, constraint_key=key))
    return requests


def engine_with_constraints(**settings: Any) -> Engine:
    engine = make_engine(**settings)
    for constraint in CONSTRAINTS:
        engine.add_constraint(constraint)
    return engine


def answer(completion: Completion) -> tuple[object, ...]:
    """What must not depend on neighbours, chunks, cache hits or preemption."""
    logprobs = tuple(round(logprob, 4) for logprob in completion.logprobs or ())
    return completion.finish_reason, completion.text, completion.token_ids, logprobs, completion.error


@cache
def alone(count: int) -> dict[str, tuple[object, ...]]:
    """What each of the mixed requests gets as the only one in the engine, without the prefix cache."""
    engine = engine_with_constraints(max_num_seqs=1, prefix_cache=False)
    return {r.request_id: answer(run_all(engine, [r])[r.request_id]) for r in mixed_requests(count)}


def test_there_are_twenty_sampling_settings_and_five_constraint_kinds() -> None:
    assert len(set(SAMPLINGS)) == 20
    assert len({c.kind for c in CONSTRAINTS}) + 1 == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
        {"max_num_seqs": 48, "max_num_batched_tokens": 64},
        {"max_num_seqs": 64, "max_num_batched_tokens": 512, "prefix_cache": False},
        {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_blocks": 60, "max_model_len": 128},
    ],
    ids=["wide", "chunked", "no-prefix-cache", "preempting"],
)
def test_a_mixed_batch_of_256_rows_gives_each_row_what_it_gets_alone(settings: dict[str, Any]) -> None:
    requests = mixed_requests(256)
    engine = engine_with_constraints(**settings)
    together = {name: answer(completion) for name, completion in run_all(engine, requests).items()}
    assert together == alone(256)
    assert (engine.stats.num_preemptions > 0) == ("num_blocks" in settings)


def test_constrained_rows_that_stop_match_their_constraint() -> None:
    done = run_all(engine_with_constraints(), mixed_requests(60, max_tokens=150))
    texts = {
        c: [d for i, d in done.items() if int(i) % 5 == c and d.finish_reason == FinishReason.STOP] for c in range(5)
    }
    assert all(texts[c] for c in (1, 2, 4))
    assert all(json.loads(d.text)["label"] in ("billing", "bug") for d in texts[1])
    assert all(re.fullmatch("[a-f]{3,9}(-[0-9]{2})?", d.text) for d in texts[2])
    assert all(re.fullmatch(r"<[xyz()]*>", d.text) for d in texts[3])
    assert all(d.text in ("cat", "category", "dog") for d in texts[4])


def test_greedy_output_equals_the_model_alone() -> None:
    model = HashModel()
    engine = make_engine(model)
    (completion,) = run_all(engine, [request("a", "hello", ignore_eos=True)]).values()
    tokens = list(b"hello")
    for token in completion.token_ids:
        assert token == int(model.expected_logits(tokens).argmax())
        tokens.append(token)
    assert completion.finish_reason == FinishReason.LENGTH
    assert len(completion.token_ids) == 12
    assert completion.num_prompt_tokens == 5


def test_a_preempted_row_with_a_matcher_ends_as_if_it_had_not_been() -> None:
    constraint = Constraint(kind=ConstraintKind.REGEX, source="([a-z]{4} ){5,40}")
    requests = [request(i, f"row {i}", key=constraint.key, max_tokens=60, temperature=1.0, seed=i) for i in range(8)]

    def run(**settings: Any) -> tuple[dict[str, tuple[object, ...]], int]:
        engine = make_engine(**settings)
        engine.add_constraint(constraint)
        done = run_all(engine, requests)
        return {name: answer(completion) for name, completion in done.items()}, engine.stats.num_preemptions

    roomy, none = run()
    tight, some = run(num_blocks=35, max_model_len=128)
    assert none == 0
    assert some > 0
    assert tight == roomy


def test_a_shared_prompt_start_is_computed_once() -> None:
    model = HashModel()
    engine = make_engine(model)
    done = run_all(engine, [request(i, "s" * 80 + f"{i:04}", max_tokens=1) for i in range(32)])
    assert sum(model.num_rows) == 84 + 31 * 4
    assert sorted(c.num_cached_tokens for c in done.values()) == [0] + [80] * 31
    assert engine.stats.num_cached_tokens == 31 * 80
    assert engine.stats.num_prompt_tokens == 32 * 84


@pytest.mark.parametrize("favourite", [" ", "\n", ","])
def test_legal_infinite_loop_a_model_that_loves_blanks_ends_valid_or_says_that_it_was_cut(favourite: str) -> None:
    model = HashModel(favourites=[ord(favourite)], boost=100.0)
    engine = make_engine(model)
    for constraint in CONSTRAINTS:
        engine.add_constraint(constraint)
    requests = [request(str(i), key=constraint.key, max_tokens=60) for i, constraint in enumerate(CONSTRAINTS)]
    done = run_all(engine, requests)
    for index, constraint in enumerate(CONSTRAINTS):
        completion = done[str(index)]
        assert completion.finish_reason in (FinishReason.STOP, FinishReason.CLOSED)
        assert make_validator(constraint).check(completion.text)[1] is None
        assert favourite * 8 not in completion.text


def test_the_end_token_stops_unless_it_is_ignored() -> None:
    model = HashModel(favourites=[END], boost=100.0)
    done = run_all(make_engine(model), [request("stop"), request("go", ignore_eos=True)])
    assert done["stop"].finish_reason == FinishReason.STOP
    assert done["stop"].token_ids == (END,)
    assert done["stop"].text == ""
    assert done["go"].finish_reason == FinishReason.LENGTH
    assert done["go"].token_ids == (END,) * 12


def test_a_grammar_that_can_only_end_stops_without_another_step() -> None:
    model = HashModel()
    engine = make_engine(model)
    constraint = Constraint(kind=ConstraintKind.CHOICE, source='["yes"]')
    engine.add_constraint(constraint)
    (completion,) = run_all(
        engine, [request("a", "hello", key=constraint.key, max_tokens=3, ignore_eos=True, force_text=False)]
    ).values()
    assert (completion.text, completion.finish_reason) == ("yes", FinishReason.STOP)
    assert model.num_rows == [5, 1, 1]
    assert completion.logprobs == (0.0, 0.0, 0.0)


def test_a_stop_string_ends_a_row_and_is_not_part_of_its_text() -> None:
    model = HashModel(favourites=range(97, 100), boost=50.0)
    free = run_all(make_engine(model), [request("a", max_tokens=40, temperature=1.0)])["a"]
    stop = free.text[7:9]
    first = free.text.index(stop)
    done = run_all(make_engine(model), [request("a", max_tokens=40, temperature=1.0, stop=("zzz", stop))])["a"]
    assert done.finish_reason == FinishReason.STOP
    assert done.text == free.text[:first]
    assert done.token_ids == free.token_ids[: first + 2]
    never = run_all(make_engine(model), [request("a", max_tokens=40, temperature=1.0, stop=("zzz",))])["a"]
    assert answer(never) == answer(free)


def test_a_prompt_that_is_too_long_ends_alone_with_its_length_and_the_limit() -> None:
    engine = make_engine(max_model_len=32)
    done = run_all(engine, [request("a"), request("long", "x" * 400), request("edge", "x" * 32), request("b")])
    assert [done[name].finish_reason for name in ("long", "edge")] == [FinishReason.PROMPT_TOO_LONG] * 2
    assert "400 tokens, limit 31" in (done["long"].error or "")
    assert done["long"].num_prompt_tokens == 400
    assert done["a"].token_ids
    assert done["b"].token_ids


def test_the_models_length_clamps_the_output() -> None:
    done = run_all(
        make_engine(max_model_len=32),
        [request("a", "x" * 31, ignore_eos=True), request("b", "x" * 25, ignore_eos=True)],
    )
    assert [len(done[name].token_ids) for name in "ab"] == [1, 7]
    assert done["b"].finish_reason == FinishReason.LENGTH
    assert make_engine(HashModel(max_position_embeddings=16)).max_model_len == 16


def test_bad_requests_end_alone_with_a_reason() -> None:
    engine = make_engine()
    engine.add(Request(request_id="chat", messages=(Message(role="user", content="x"),)))
    engine.add(request("empty", ""))
    engine.add(Request(request_id="range", token_ids=(1, VOCAB_SIZE)))
    engine.add(request("unknown", key="missing"))
    engine.add(request("good"))
    done = finish_all(engine)
    assert [done[name].finish_reason for name in ("chat", "empty", "range")] == [FinishReason.ERROR] * 3
    assert "chat template" in (done["chat"].error or "")
    assert "no tokens" in (done["empty"].error or "")
    assert done["unknown"].finish_reason == FinishReason.CONSTRAINT_ERROR
    assert done["good"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_a_broken_constraint_and_a_dead_end_end_their_own_rows_only() -> None:
    engine = make_engine()
    good = Constraint(kind=ConstraintKind.REGEX, source="a|b")
    broken = Constraint(kind=ConstraintKind.EBNF, source='root ::= "a"\nroot ::= "b"')
    dead = Constraint(kind=ConstraintKind.CHOICE, source='["~"]')
    late = Constraint(kind=ConstraintKind.CHOICE, source='["x~", "x~y"]')
    for constraint in (good, broken, dead, late):
        engine.add_constraint(constraint)
    names = {"1": good, "2": broken, "3": dead, "4": late, "5": good}
    requests = [request(name, f"row {name}", key=constraint.key) for name, constraint in names.items()]
    done = run_all(engine, [*requests, request("free", "row free")])
    assert [done[name].finish_reason for name in "12345"] == ["stop", *["constraint_error"] * 3, "stop"]
    assert done["1"].text in "ab"
    assert "defined twice" in (done["2"].error or "")
    assert "allows no token after 0 output" in (done["3"].error or "")
    assert "allows no token after 1 output" in (done["4"].error or "")
    assert answer(done["free"]) == answer(run_all(make_engine(), [request("free", "row free")])["free"])


def test_cancelled_rows_end_once_wherever_they_are() -> None:
    engine = make_engine(max_num_seqs=2)
    constraint = Constraint(kind=ConstraintKind.REGEX, source="[a-z]*")
    engine.add_constraint(constraint)
    for name in ("running", "kept", "waiting"):
        engine.add(request(name, f"row {name}", ignore_eos=True))
    engine.add(request("compiling", key=constraint.key))
    assert engine.step() == []
    engine.cancel(["running", "waiting", "compiling", "nobody"])
    engine.cancel(["running"])
    done = finish_all(engine)
    assert {name for name, c in done.items() if c.finish_reason == FinishReason.CANCELLED} == {
        "running",
        "waiting",
        "compiling",
    }
    assert done["kept"].finish_reason == FinishReason.LENGTH
    assert len(done["running"].token_ids) == 1


def test_constraints_of_finished_rows_are_forgotten_and_those_of_unfinished_rows_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unbounded buffering: one constraint a row, a million rows."""
    monkeypatch.setattr("engine.grammar.KNOWN_CHARS", 20 * CHARS_PER_CONSTRAINT)
    monkeypatch.setattr("engine.grammar.CACHE_BYTES", 10)
    engine = make_engine(max_num_seqs=4)
    slow = Constraint(kind=ConstraintKind.REGEX, source="[a-z]{150}")
    engine.add_constraint(slow)
    engine.add(request("slow", key=slow.key, max_tokens=150))
    done: dict[str, Completion] = {}
    for row in range(60):
        source = f'["{row}"]' if row % 3 else f'root ::= "{row}" missing'
        own = Constraint(kind=ConstraintKind.CHOICE if row % 3 else ConstraintKind.EBNF, source=source)
        engine.add_constraint(own)
        engine.add(request(str(row), key=own.key))
        while True:
            done |= {completion.request_id: completion for completion in engine.step()}
            if len(engine._sequences) <= 10:  # a busy machine compiles slowly, and what is unfinished is kept
                break
        assert len(engine._grammars._constraints) <= 20
        assert len(engine._grammars._errors) <= 20
        assert len(engine._grammars._compiled) <= 1
    engine.add(request("again", key=slow.key, max_tokens=150))
    done |= finish_all(engine)
    assert len(done["slow"].text) == len(done["again"].text) == 150
    for row in range(60):
        completion = done[str(row)]
        assert (completion.finish_reason, completion.text) == (
            "stop" if row % 3 else "constraint_error",
            str(row) if row % 3 else "",
        )


def test_rows_wait_for_their_grammar_while_others_go_on() -> None:
    engine = make_engine()
    constraint = CONSTRAINTS[0]
    engine.add_constraint(constraint)
    engine.add(request("steered", key=constraint.key, max_tokens=100))
    engine.add(request("free", max_tokens=1))
    assert [c.request_id for c in engine.step()] == ["free"]
    assert engine.stats.num_waiting + engine.stats.num_running >= 1
    assert set(finish_all(engine)) == {"steered"}


def test_an_idle_engine_takes_a_second_job() -> None:
    engine = engine_with_constraints()
    first = run_all(engine, mixed_requests(20))
    assert engine.step() == []
    second = run_all(engine, mixed_requests(20))
    assert {n: answer(c) for n, c in first.items()} == {n: answer(c) for n, c in second.items()}


def test_an_id_in_flight_is_refused() -> None:
    engine = make_engine()
    engine.add(request("a"))
    with pytest.raises(EngineError, match="'a' is in flight"):
        engine.add(request("a"))


def test_an_exception_in_a_step_is_not_swallowed() -> None:
    model = HashModel()
    engine = make_engine(model)
    engine.add(request("a"))
    model.logits = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        engine.step()


def test_the_counters_add_up() -> None:
    model = HashModel()
    engine = make_engine(model)
    done = run_all(engine, [request(i, f"{i}" * 9) for i in range(5)])
    assert engine.stats.num_steps == len(model.num_rows)
    assert engine.stats.num_batched_tokens == sum(model.num_rows)
    assert engine.stats.num_output_tokens == sum(len(c.token_ids) for c in done.values())
    assert engine.stats.num_finished == 5
    assert all(c.seconds > 0 for c in done.values())
    assert all(0 < c.first_token_s <= c.seconds for c in done.values())


def test_sizes_follow_the_device_unless_they_are_set() -> None:
    cpu = torch.device("cpu")
    sizes = resolve_sizes(EngineSettings(), cpu, block_size=16)
    assert (sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.kv_cache_bytes) == (64, 512, 2 * 2**30)
    assert sizes.block_size == 16
    sizes = resolve_sizes(EngineSettings(block_size=8, kv_cache_gib=0.5), cpu, block_size=16)
    assert (sizes.block_size, sizes.kv_cache_bytes) == (8, 2**29)
    with pytest.raises(SettingsError, match=r"engine\.device 'nowhere'"):
        select_device(EngineSettings(device="nowhere"))


def test_a_cache_too_small_for_one_row_is_refused_at_the_start() -> None:
    with pytest.raises(EngineError, match=r"raise engine\.kv_cache_gib or lower max_model_len"):
        make_engine(num_blocks=10)
