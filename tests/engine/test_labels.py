"""Probabilities of whole labels against brute force: every label spelled out, every branching point computed."""

import functools
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine.labels import build_trie, locate_choices
from engine.loop import Engine
from schemas.model_files import model_ref
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, Label, Request, Sampling
from schemas.settings import EngineSettings
from tests.engine.fakes import END, HashModel, make_engine, run_all
from tests.tiny_models import write_tiny_model

ROUTES = ["card", "card_fee", "card_fees", "cash", "überweisung", "übertrag", 'o"th']
FIELDS = {
    "route": {"enum": ROUTES},
    "is_urgent": {"type": "boolean"},
    "grade": {"enum": [1, 12, 120, 2]},
    "tone": {"anyOf": [{"const": "calm"}, {"const": "cross"}, {"type": "null"}]},
    "reason": {"type": "string", "maxLength": 3},
    "stars": {"type": "integer", "minimum": 8, "maximum": 11},
}
OBJECT = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}
SCHEMA = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(OBJECT))
CHOICE = Constraint(kind=ConstraintKind.CHOICE, source='["cat", "category", "cats", "dog"]')
NEXT_LOGITS = Callable[[list[int]], torch.Tensor]


def next_logits(model: Path) -> NEXT_LOGITS:
    """What transformers expects after given tokens; labels begin alike, so that many ask the same."""
    oracle = AutoModelForCausalLM.from_pretrained(model)

    @functools.cache
    @torch.inference_mode()
    def logits(*token_ids: int) -> torch.Tensor:
        return oracle(torch.tensor([token_ids])).logits[0, -1]

    return lambda token_ids: logits(*token_ids)


def ask(engine: Engine, constraint: Constraint, prompt: str = "x", **sampling: Any) -> Completion:
    engine.add_constraint(constraint)
    parameters = Sampling(**{"max_tokens": 200, "logprobs": True, **sampling})
    request = Request(request_id="r", text=prompt, constraint_key=constraint.key, sampling=parameters, seed=5)
    completion = run_all(engine, [request])["r"]
    assert completion.finish_reason is FinishReason.STOP, completion
    return completion


def enumerate_labels(spellings: dict[str, list[int]], before: list[int], logits: NEXT_LOGITS) -> dict[str, float]:
    """Each label token by token, among the tokens with which any label goes on after what is written so far."""
    found = {}
    for name, tokens in spellings.items():
        found[name] = 1.0
        for depth, token in enumerate(tokens):
            ways = sorted({other[depth] for other in spellings.values() if other[:depth] == tokens[:depth]})
            shares = logits(before + tokens[:depth]).double()[ways].softmax(0)
            found[name] *= float(shares[ways.index(token)])
    return found


def spell_in_bytes(label: Label, text: str, names: dict[str, str]) -> tuple[dict[str, list[int]], list[int]]:
    """The bytes of every label with the byte that follows, and the bytes before them."""
    if label.path == "":
        return {name: [*written.encode(), END] for name, written in names.items()}, []
    key = f'"{label.path[1:]}": '
    start = text.index(key) + len(key)
    following = text[start + len(names[label.text]) :][:1]
    return {name: list((written + following).encode()) for name, written in names.items()}, list(text[:start].encode())


def names_of(constraint: Constraint, path: str) -> dict[str, str]:
    if constraint is CHOICE:
        return {name: name for name in json.loads(CHOICE.source)}
    field = FIELDS[path[1:]]
    values = {"is_urgent": [True, False], "tone": ["calm", "cross", None], "stars": range(8, 12)}
    listed = values.get(path[1:]) or field["enum"]
    return {
        value if isinstance(value, str) else json.dumps(value): json.dumps(value, ensure_ascii=False)
        for value in listed
    }


@pytest.mark.parametrize("constraint", [SCHEMA, CHOICE], ids=["object", "choice"])
@pytest.mark.parametrize("temperature", [0, 1.7])
def test_a_labels_probability_is_that_of_brute_force(constraint: Constraint, temperature: float) -> None:
    model = HashModel()
    for number in range(6):
        completion = ask(make_engine(model), constraint, f"x{number}", temperature=temperature, top_labels=99)
        drawn = ask(make_engine(model), constraint, f"x{number}", temperature=temperature).labels
        fields = [] if constraint is CHOICE else ["route", "is_urgent", "grade", "tone", "stars"]
        assert [label.path for label in completion.labels] == ([f"/{name}" for name in fields] or [""])
        for label, unranked in zip(completion.labels, drawn, strict=True):
            spellings, before = spell_in_bytes(label, completion.text, names_of(constraint, label.path))
            expected = enumerate_labels(spellings, [*f"x{number}".encode(), *before], model.expected_logits)
            assert dict(label.ranked) == pytest.approx(expected, abs=1e-5)
            assert sum(expected.values()) == pytest.approx(1)
            assert label.probability == dict(label.ranked)[label.text]
            assert (unranked.text, unranked.ranked) == (label.text, ())
            assert unranked.probability == pytest.approx(expected[label.text], abs=1e-5)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("labels"))


def test_tokens_of_several_bytes_are_those_of_the_tokenizer(tiny_model: Path) -> None:
    """The oracle spells whole documents with the tokenizer and asks transformers."""
    engine = Engine(model_ref(str(tiny_model)), EngineSettings(device="cpu", num_threads=1))
    logits = next_logits(tiny_model)
    tokenizer = engine._text.tokenizer.backend_tokenizer
    routes = ["billing", "bug", "bugs", "bill", "other", "over"]
    schema = {
        **OBJECT,
        "properties": {"route": {"enum": routes}, "ok": {"type": "boolean"}},
        "required": ["route", "ok"],
    }
    constraint = Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema))
    prompt = tokenizer.encode("the route is", add_special_tokens=False).ids

    completion = ask(engine, constraint, "the route is", top_labels=6)
    document = json.loads(completion.text)
    for label, values in zip(completion.labels, [routes, [True, False]], strict=True):
        key = f'"{label.path[1:]}": '
        start = completion.text.index(key) + len(key)
        num_before = sum(  # output tokens that end before the label
            len(tokenizer.decode(completion.token_ids[:number])) <= start
            for number in range(1, len(completion.token_ids))
        )
        lead = tokenizer.decode(completion.token_ids[:num_before])
        before = prompt + list(completion.token_ids[:num_before])
        rest = {}
        for value in values:
            name = value if isinstance(value, str) else json.dumps(value)
            written = json.dumps({**document, label.path[1:]: value}).removeprefix(lead)
            rest[name] = tokenizer.encode(written, add_special_tokens=False).ids
        expected = enumerate_labels(rest, before, logits)
        assert dict(label.ranked) == pytest.approx(expected, abs=1e-4)
        assert list(label.ranked) == sorted(label.ranked, key=lambda pair: -pair[1])
        best, second = (probability for _, probability in label.ranked[:2])
        assert label.margin == pytest.approx(best - second)
        assert label.entropy == pytest.approx(-sum(p * math.log(p) for p in expected.values()), abs=1e-3)


SPELLED = {
    "why": {"type": "string", "maxLength": 6},
    "route": {"enum": ["billing", "bug", "bugs", "bill", "other", "over", "überweisung", "ü"]},  # ü is two tokens
    "is_urgent": {"type": "boolean"},
    "grade": {"enum": [1, 12, 120, 2]},
    "tone": {"anyOf": [{"const": "calm"}, {"const": "cross"}, {"type": "null"}]},  # the blank before goes with a quote
    "stars": {"type": "integer", "minimum": 8, "maximum": 11},
}
VALUES: dict[str, list[Any]] = {
    "route": SPELLED["route"]["enum"],
    "is_urgent": [True, False],
    "grade": [1, 12, 120, 2],
    "tone": ["calm", "cross", None],
    "stars": [8, 9, 10, 11],
}


@pytest.mark.parametrize("pattern", [{}, {"pattern": "^[a-z ]*$"}], ids=["xgrammar", "llguidance"])
def test_the_drawn_labels_probability_is_that_of_brute_force_without_ranking(
    tiny_model: Path, pattern: dict[str, str]
) -> None:
    """The oracle spells whole documents with the tokenizer, from before the blank in front of a label on."""
    engine = Engine(model_ref(str(tiny_model)), EngineSettings(device="cpu", num_threads=1))
    logits = next_logits(tiny_model)
    tokenizer = engine._text.tokenizer.backend_tokenizer
    fields = {**SPELLED, "why": {**SPELLED["why"], **pattern}}
    source = json.dumps({**OBJECT, "properties": fields, "required": list(fields)})
    engine.add_constraint(constraint := Constraint(kind=ConstraintKind.JSON_SCHEMA, source=source))

    requests = [
        Request(
            request_id=f"{'ranked' if top_labels else 'drawn'} {seed}",
            text="the route is",
            seed=seed,
            constraint_key=constraint.key,
            sampling=Sampling(temperature=1.0, max_tokens=200, top_labels=top_labels),
        )
        for seed in range(6)
        for top_labels in (0, 99)
    ]
    done = run_all(engine, requests)
    prompt = tokenizer.encode("the route is", add_special_tokens=False).ids
    for seed in range(6):
        drawn, ranked = done[f"drawn {seed}"], done[f"ranked {seed}"]
        assert (drawn.text, [label.path[1:] for label in drawn.labels]) == (ranked.text, list(VALUES))
        document, ids = json.loads(drawn.text), list(drawn.token_ids)
        for label, other in zip(drawn.labels, ranked.labels, strict=True):
            key = label.path[1:]
            blank = drawn.text.index(f'"{key}": ') + len(key) + 2
            num_before = sum(len(tokenizer.decode(ids[:number])) <= blank for number in range(1, len(ids)))
            begun = tokenizer.decode(ids[:num_before])
            names = {value if isinstance(value, str) else json.dumps(value): value for value in VALUES[key]}
            texts = {name: json.dumps({**document, key: value}, ensure_ascii=False) for name, value in names.items()}
            spellings = {
                name: tokenizer.encode(text.removeprefix(begun), add_special_tokens=False).ids
                for name, text in texts.items()
            }
            expected = enumerate_labels(spellings, prompt + ids[:num_before], logits)
            assert sum(expected.values()) == pytest.approx(1)
            assert label.probability == pytest.approx(expected[label.text], abs=1e-4)
            assert dict(other.ranked) == pytest.approx(expected, abs=1e-4)


def test_the_probabilities_of_all_answers_that_are_drawn_sum_to_one(tiny_model: Path) -> None:
    engine = Engine(model_ref(str(tiny_model)), EngineSettings(device="cpu", num_threads=1))
    labels = ["billing", "bill", "bills", "b", "over", "other", "ü"]
    engine.add_constraint(constraint := Constraint(kind=ConstraintKind.CHOICE, source=json.dumps(labels)))
    sampling = Sampling(temperature=4.0)
    requests = [
        Request(request_id=str(seed), text="it is", seed=seed, constraint_key=constraint.key, sampling=sampling)
        for seed in range(200)
    ]
    found = {done.text: done.labels[0].probability for done in run_all(engine, requests).values()}
    assert found.keys() == set(labels)
    assert sum(found.values()) == pytest.approx(1, abs=1e-4)


def test_only_the_most_probable_labels_are_told(tiny_model: Path) -> None:
    few, all_of_them = (ask(make_engine(), SCHEMA, top_labels=number).labels[0] for number in (2, 99))
    assert few.ranked == all_of_them.ranked[:2]
    assert (few.entropy, few.margin) == (all_of_them.entropy, all_of_them.margin)


def test_rankings_of_many_rows_share_one_step_behind_their_cached_prefixes() -> None:
    model = HashModel()
    engine = make_engine(model, max_num_seqs=64)
    engine.add_constraint(CHOICE)
    sampling = Sampling(top_labels=4)
    prompt = "a long prompt that is computed once " * 4
    requests = [
        Request(request_id=str(number), text=prompt, constraint_key=CHOICE.key, sampling=sampling)
        for number in range(8)
    ]
    completions = run_all(engine, requests)
    num_branches = 4  # c or d; category, cats or cat; the end after cat and after cats are told apart by then
    assert all(len(completion.labels[0].ranked) == 4 for completion in completions.values())
    assert model.num_rows[-1] <= len(requests) * num_branches * (4 + len("category"))


@pytest.mark.parametrize("changes", [{"prefix_cache": False}, {"num_blocks": 70}, {"overlap": True}])
def test_a_ranking_does_not_depend_on_how_the_engine_runs(changes: dict[str, Any]) -> None:
    expected = ask(make_engine(max_model_len=256), SCHEMA, "x" * 40, top_labels=9)
    found = ask(make_engine(max_model_len=256, **changes), SCHEMA, "x" * 40, top_labels=9)
    for label, other in zip(found.labels, expected.labels, strict=True):
        assert dict(label.ranked) == pytest.approx(dict(other.ranked))


def test_a_row_that_is_cancelled_while_its_labels_are_ranked_ends_once() -> None:
    engine = make_engine()
    engine.add_constraint(CHOICE)
    sampling = Sampling(top_labels=4)
    engine.add(Request(request_id="r", text="x", constraint_key=CHOICE.key, sampling=sampling))
    completions: list[Completion] = []
    while engine.has_work():
        completions += engine.step()
        engine.cancel(["r"])
        if completions:
            break
    assert not engine.has_work()
    assert [completion.request_id for completion in completions] == ["r"]


def test_a_set_whose_labels_do_not_fit_into_the_model_is_not_ranked() -> None:
    long = Constraint(kind=ConstraintKind.CHOICE, source=json.dumps(["b", "a" * 100 + "b", "a" * 100 + "c"]))
    engine = make_engine(HashModel(favourites=[ord("b")], boost=99), max_model_len=64)
    label = ask(engine, long, top_labels=3).labels[0]
    assert (label.text, label.ranked, label.entropy) == ("b", (), None)
    assert label.probability == pytest.approx(1)


def test_a_free_text_and_an_open_constraint_have_no_labels() -> None:
    regex = Constraint(kind=ConstraintKind.REGEX, source="[a-f]{3}")
    assert ask(make_engine(), regex, top_labels=3).labels == ()


def test_a_token_may_begin_before_its_label_and_end_after_it() -> None:
    constraint = Constraint(
        kind=ConstraintKind.JSON_SCHEMA,
        source=json.dumps({**OBJECT, "properties": {"ü": {"enum": ["ä", "äu"]}}, "required": ["ü"]}),
    )
    text = '{"ü": "ä"}'
    raw = text.encode()
    for cuts in itertools.combinations(range(1, len(raw)), 3):
        pieces = tuple(raw[low:high] for low, high in itertools.pairwise((0, *cuts, len(raw))))
        (located,) = locate_choices(constraint, text, pieces)
        spelled = b"".join(pieces[located.start : located.end])
        assert '"ä"'.encode() in spelled
        assert (b"".join(pieces[: located.num_before]) + located.lead.encode()).decode() == text[: text.index('"ä')]
    assert locate_choices(constraint, text, (b"other",)) == ()


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), min_size=2, max_size=8, unique=True),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
def test_spellings_of_one_label_are_summed(spellings: list[tuple[int, ...]], owners: list[int]) -> None:
    owned = [(owner, (*ids, 9)) for owner, ids in zip(owners, spellings, strict=False)]
    trie = build_trie(3, owned)
    assert trie is not None
    weights = torch.Generator().manual_seed(0)
    logits: dict[tuple[int, ...], torch.Tensor] = defaultdict(lambda: torch.rand(10, generator=weights))
    expected = [0.0] * 3
    for owner, ids in owned:
        by_name = enumerate_labels({str(o): list(o) for _, o in owned}, [], lambda before: logits[tuple(before)])
        expected[owner] += by_name[str(ids)]
    logprobs = [logits[branch.prefix].double()[list(branch.tokens)].log_softmax(0).tolist() for branch in trie.branches]
    assert trie.probabilities(logprobs) == pytest.approx(expected)
    assert sum(expected) == pytest.approx(1)


def test_labels_that_the_tokenizer_spells_alike_are_not_ranked() -> None:
    assert build_trie(2, [(0, (1, 2)), (1, (1, 2))]) is None
