"""Rows that think before they answer are as two requests, one free up to the marker and one constrained behind it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.grammar import Grammars
from engine.llm import LLM, SamplingParams
from engine.loop import Engine
from engine.parts import Parts
from engine.text import Text
from engine.thinking import Thought, fit
from kernels.reference import ReferenceKernels
from schemas.constraints import load_constraint, make_validator
from schemas.records import (
    Completion,
    Constraint,
    ConstraintKind,
    FinishReason,
    ModelRef,
    Request,
    Sampling,
    Thinking,
)
from schemas.settings import EngineSettings
from tests.demo_model import demo_model
from tests.engine.fakes import END, ByteText, HashModel, byte_tokenizer, finish_all
from tests.tiny_models import write_tiny_model

MERGED = {257: "a#!b", 258: "!{", 259: "#!\n", 260: "<end>"}
"""Tokens of several characters; the last one is special."""

ROUTE = load_constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {"text": {"type": "string"}, "route": {"enum": ["billing", "bug"]}},
            "required": ["text", "route"],
            "additionalProperties": False,
        }
    ),
)


class MergingText(ByteText):
    """Bytes, and the tokens of MERGED."""

    def __init__(self) -> None:
        super().__init__()
        tokenizer = byte_tokenizer().backend_tokenizer
        tokenizer.add_tokens([text for token_id, text in MERGED.items() if token_id != 260])
        tokenizer.add_special_tokens([MERGED[260]])
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
        assert self.tokenizer.convert_ids_to_tokens(list(MERGED)) == list(MERGED.values())

    def encode_after(self, context: tuple[int, ...], text: str) -> tuple[int, ...]:
        return (260,) if text == MERGED[260] else super().encode_after(context, text)

    def decode(self, token_ids: Iterable[int]) -> str:
        shown = (bytes([t]) if t < 256 else MERGED.get(t, "").encode() for t in token_ids if t not in (END, 260))
        return b"".join(shown).decode("utf-8", "replace")


def make_engine(model: HashModel, *, num_blocks: int = 0, max_model_len: int = 512, **settings: Any) -> Engine:
    settings = {"device": "cpu", "block_size": 4, "num_threads": 1, **settings}
    if num_blocks:
        settings["kv_cache_gib"] = num_blocks * model.cache_bytes_per_block(4) / 2**30
    parts = Parts(model, MergingText(), ReferenceKernels(), (), torch.device("cpu"))
    ref = ModelRef(name="hash", digest="0" * 16, max_model_len=max_model_len)
    return Engine(ref, EngineSettings(**settings), parts)


def run(
    model: HashModel, requests: Iterable[Request], constraints: Iterable[Constraint] = (), **options: Any
) -> list[Completion]:
    engine = make_engine(model, **options)
    for constraint in constraints:
        engine.add_constraint(constraint)
    requests = list(requests)
    for request in requests:
        engine.add(request)
    done = finish_all(engine)
    return [done[request.request_id] for request in requests]


def ask(
    index: int, end: str, num_tokens: int, *, constraint: Constraint | None = None, answer: int = 60, **sampling: Any
) -> Request:
    thinking = Thinking(max_tokens=num_tokens, end=end)
    return Request(
        request_id=str(index),
        text=f"row {index}",
        constraint_key=constraint.key if constraint else None,
        sampling=Sampling(thinking=thinking, max_tokens=thinking.budget + answer, **sampling),
        seed=index,
    )


ENDS = ("#", "#!", "a#!", "<end>", "é!")
LIKELY = HashModel(favourites=[*b"#!a#\xc3\xa9", *MERGED, END], boost=6.0)
ASKED = [
    ask(20 * i + 10 * j + k, end, num_tokens, constraint=constraint)
    for i, end in enumerate(ENDS)
    for j, constraint in enumerate((None, ROUTE))
    for k, num_tokens in enumerate((1, 2, 3, 5, 8, 21, 55))
]


def thought_of(free: tuple[int, ...], request: Request) -> tuple[int, ...]:
    """The thinking and its marker, from what the model goes on with freely."""
    thinking = request.sampling.thinking
    assert thinking is not None
    names = {**{byte: bytes([byte]) for byte in range(256)}, **{k: v.encode() for k, v in MERGED.items()}}
    special, kept = MERGED[260].encode(), []
    for token_id in free:
        before = b"".join(names.get(token, b"") for token in kept)
        after = before + names.get(token_id, b"")
        text, found, _ = after.partition(thinking.end.encode())
        if found:
            rest = (text + found)[len(before) :]
            return (*kept, *((260,) if rest == special else rest))
        is_over = token_id == END
        kept += [] if is_over else [token_id]
        if is_over or len(kept) == thinking.max_tokens:
            text = before if is_over else after
            begun = max(n for n in range(len(thinking.end)) if text.endswith(thinking.end[:n].encode()))
            missing = thinking.end[begun:].encode()
            return (*kept, *((260,) if missing == special else missing))
    raise AssertionError("the budget ends it")


def test_a_row_thinks_as_a_free_one_and_answers_as_one_whose_prompt_ends_with_the_thought() -> None:
    free = run(
        LIKELY,
        [
            Request(request_id=r.request_id, text=r.text, sampling=Sampling(max_tokens=60, ignore_eos=True))
            for r in ASKED
        ],
    )
    thoughts = [thought_of(completion.token_ids, request) for completion, request in zip(free, ASKED, strict=True)]
    done = run(LIKELY, ASKED, [ROUTE])
    answers = run(
        LIKELY,
        [
            Request(
                request_id=request.request_id,
                token_ids=(*(request.text or "").encode(), *thought),
                constraint_key=request.constraint_key,
                sampling=Sampling(max_tokens=request.sampling.budget - len(thought)),
            )
            for request, thought in zip(ASKED, thoughts, strict=True)
        ],
        [ROUTE],
    )
    for request, thought, completion, answer in zip(ASKED, thoughts, done, answers, strict=True):
        assert completion.token_ids[: completion.num_reasoning_tokens] == thought, request
        assert completion.token_ids[len(thought) :] == answer.token_ids
        assert completion.finish_reason is answer.finish_reason
        assert completion.text == (answer.text if request.constraint_key else answer.text.lstrip())
        assert completion.labels == answer.labels
        assert len(completion.token_ids) <= request.sampling.budget
        if request.constraint_key:
            assert make_validator(ROUTE).check(completion.text)[1] is None
    limits = [request.sampling.thinking_budget for request in ASKED]
    assert any(c.num_reasoning_tokens < limit / 2 for c, limit in zip(done, limits, strict=True))
    assert any(c.num_reasoning_tokens == limit for c, limit in zip(done, limits, strict=True))
    assert {c.finish_reason for c in done} >= {FinishReason.STOP, FinishReason.CLOSED}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_thinking_row_is_the_same_in_every_arrangement(temperature: float) -> None:
    asked = [
        ask(i, end, num_tokens, constraint=constraint, answer=40, temperature=temperature, stop=("z",))
        for i, (end, num_tokens, constraint) in enumerate(
            (end, num_tokens, constraint) for end in ENDS for num_tokens in (2, 13) for constraint in (None, ROUTE)
        )
    ]

    def outcomes(**options: Any) -> list[tuple[Any, ...]]:
        done = run(LIKELY, asked, [ROUTE], **options)
        return [(c.token_ids, c.reasoning, c.text, c.finish_reason) for c in done]

    alone = outcomes(max_num_seqs=1, prefix_cache=False)
    assert outcomes(overlap=True) == alone
    assert outcomes(overlap=True, num_blocks=60, max_model_len=160, max_num_batched_tokens=16) == alone
    assert outcomes(num_blocks=60, max_model_len=160) == alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_steps_launched_ahead_change_no_thought_and_no_answer(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")
    so_args = {"schema_type": "choice", "schema": ["cat", "category", "dog"]}
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=100,
            thinking_token_budget=1 + index % 40,
            thinking_end="e",
            so_args=so_args if index % 3 else None,
        )
        for index in range(64)
    ]
    answers = []
    for overlap in (False, True):
        with LLM(str(directory), dtype="float32", max_model_len=256, overlap=overlap, max_num_seqs=32) as llm:
            done = llm.generate([f"row {index}" for index in range(64)], params)
            answers.append([(completion.reasoning, completion.token_ids) for completion in done])
    assert answers[0] == answers[1]


def test_preemption_while_thinking_keeps_what_was_thought() -> None:
    asked = [ask(i, "#!", 30, constraint=ROUTE, answer=45) for i in range(10)]
    engine = make_engine(LIKELY, num_blocks=60, max_model_len=160, overlap=True)
    engine.add_constraint(ROUTE)
    for request in asked:
        engine.add(request)
    done = finish_all(engine)
    assert engine.stats.num_preemptions > 0
    expected = run(LIKELY, asked, [ROUTE], max_num_seqs=1)
    assert [done[request.request_id].token_ids for request in asked] == [c.token_ids for c in expected]


def test_stop_strings_and_the_end_token_end_the_answer_but_not_the_thinking() -> None:
    model = HashModel(favourites=b"sz#", boost=8.0)
    (completion,) = run(model, [ask(0, "#s#z", 200, answer=200, stop=("zs",))])
    assert completion.reasoning is not None
    assert "zs" in completion.reasoning
    assert completion.finish_reason is FinishReason.STOP
    assert "zs" not in completion.text


def test_reasoning_has_neither_marker_nor_blanks_around_it() -> None:
    engine = make_engine(HashModel())
    request = ask(0, "</t>", 30)
    sequence_text = "<t>\n so it is \n</t>"
    engine.add(request)
    sequence = engine._sequences["0"]
    for byte in sequence_text.encode():
        engine._thoughts.extend(sequence, (byte,), -1.0)
    assert (sequence.thought, engine._thoughts.reasoning(sequence)) == (None, "so it is")
    assert sequence.num_thought == len(sequence_text)
    assert sequence.logprobs == [-1.0] * len(sequence_text)


def test_a_cancelled_thought_is_no_answer() -> None:
    engine = make_engine(HashModel(favourites=b"xyz", boost=30.0))
    engine.add(ask(0, "#", 100))
    for _ in range(5):
        engine.step()
    engine.cancel(["0"])
    (completion,) = finish_all(engine).values()
    assert (completion.finish_reason, completion.text) == (FinishReason.CANCELLED, "")
    assert completion.num_reasoning_tokens == len(completion.token_ids) == len(completion.reasoning or "") > 0


@pytest.mark.parametrize("num_left", range(1, 40))
def test_with_little_room_thinking_and_answer_give_way_alike(num_left: int) -> None:
    request = ask(0, "</think>", 20, constraint=ROUTE, answer=80)
    prompt = "x" * (200 - num_left)
    (completion,) = run(
        LIKELY,
        [Request(request_id="0", text=prompt, constraint_key=ROUTE.key, sampling=request.sampling)],
        [ROUTE],
        max_model_len=200,
    )
    assert len(completion.token_ids) <= num_left
    assert completion.num_reasoning_tokens <= max(8, num_left // 5 + 8)


@given(st.lists(st.sampled_from(["<", "/", "t", ">", "</", "t>", "/t>a", "x", "</t", "é"]), max_size=30))
def test_a_marker_is_found_wherever_it_is_cut(pieces: list[str]) -> None:
    thought, written = Thought("</t>", 100), ""
    for piece in pieces:
        size = thought.read(piece.encode())
        written += piece
        assert (size is not None) == ("</t>" in written)
        if size is not None:
            assert (written[: len(written) - len(piece)].encode() + piece.encode()[:size]).endswith(b"</t>")
            return
        assert (written + thought.missing()).endswith("</t>")
        assert (written + thought.missing()).count("</t>") == 1


def test_thinking_takes_its_share_of_the_tokens_there_are() -> None:
    thinking = Thinking(max_tokens=100)
    sampling = Sampling(thinking=thinking, max_tokens=200)
    assert [fit(thinking, sampling, num) for num in (200, 100, 20, 9, 1)] == [100, 50, 10, 0, 0]


def test_pieces_are_the_bytes_of_tokens_special_ones_by_name() -> None:
    text = Text(demo_model())
    grammars = Grammars(
        text.tokenizer, vocab_size=text.vocab_size, end_token_ids=text.eos_token_ids, timeout_s=20, num_threads=1
    )
    written = "<|im_start|>user\n Straße ◁/think▷ </think>\n\n{1}<|im_end|>"
    ids = text.tokenizer.backend_tokenizer.encode(written, add_special_tokens=False).ids
    assert b"".join(grammars.pieces[token_id] for token_id in ids).decode() == written


def test_thinking_that_leaves_no_room_for_an_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be above 108, which thinking and its end may take"):
        Sampling(thinking=Thinking(max_tokens=100), max_tokens=108)
    with pytest.raises(ValueError, match="at least 1 token"):
        Thinking(max_tokens=0)
