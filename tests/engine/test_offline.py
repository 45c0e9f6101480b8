"""The offline example: perplexity of given texts equals the oracle's, and a whole run on two replicas."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from engine.frames import Heartbeat
from engine.llm import SamplingParams
from engine.loop import Engine
from engine.offline import STRUCTURED_CASES, describe_drafts, main, perplexity, read_samples, tokenize
from engine.parts import load_parts
from schemas.errors import InputDataError
from schemas.model_files import model_ref
from schemas.records import FinishReason, Request
from schemas.settings import EngineSettings
from tests.engine.fakes import run_all
from tests.tiny_models import VOCAB_SIZE, write_tiny_drafter, write_tiny_model


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("overlap", [False, True])
def test_given_tokens_get_the_oracles_probabilities_through_the_decode_path(
    tiny_model: Path, oracle: Any, overlap: bool
) -> None:
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=draw).tolist() for length in (1, 9, 30)]
    golden = [torch.randint(0, VOCAB_SIZE, (length,), generator=draw).tolist() for length in (12, 5, 20)]
    golden[0][4] = 2  # the end token ends nothing here
    ref = model_ref(str(tiny_model), dtype="float32", max_model_len=128)
    settings = EngineSettings(device="cpu", num_threads=1, kv_cache_gib=0.01, overlap=overlap, block_size=4)
    requests = [
        Request(
            request_id=str(index),
            token_ids=tuple(prompt),
            sampling=SamplingParams(golden_token_ids=ids, logprobs=True, temperature=index).sampling,
            golden_token_ids=tuple(ids),
        )
        for index, (prompt, ids) in enumerate(zip(prompts, golden, strict=True))
    ]
    free = Request(request_id="free", text="a", sampling=SamplingParams(max_tokens=30, temperature=0).sampling)
    done = run_all(Engine(ref, settings, load_parts(ref, settings)), [*requests, free])
    for prompt, ids, request in zip(prompts, golden, requests, strict=True):
        completion = done[request.request_id]
        assert completion.token_ids == tuple(ids)
        assert completion.finish_reason == FinishReason.LENGTH
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)
        assert completion.logprobs is not None
        assert perplexity(completion.logprobs) == pytest.approx(float((-expected.mean()).exp()), rel=1e-3)
    assert len(done["free"].token_ids) > 0


def test_golden_tokens_and_a_constraint_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="without so_args"):
        SamplingParams(golden_token_ids=[1], so_args={"schema_type": "regex", "schema": "a"})
    with pytest.raises(ValueError, match="some tokens"):
        SamplingParams(golden_token_ids=[])


def test_a_golden_token_outside_the_vocabulary_is_the_requests_error(tiny_model: Path) -> None:
    ref = model_ref(str(tiny_model), dtype="float32", max_model_len=128)
    settings = EngineSettings(device="cpu", num_threads=1, kv_cache_gib=0.01)
    request = Request(request_id="1", text="a", golden_token_ids=(VOCAB_SIZE,))
    done = run_all(Engine(ref, settings, load_parts(ref, settings)), [request])
    assert "golden tokens have an id outside" in (done["1"].error or "")


def test_a_run_on_two_replicas_tells_texts_perplexity_and_constraints(tiny_model: Path, tmp_path: Path) -> None:
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"prompt": "the route", "continuation": " is billing"}\n' * 3)
    arguments = ["--model", tiny_model, "--device", "cpu", "--dp", 2, "--max-tokens", 4, "--samples", samples]
    arguments += ["--num-draft-tokens", 2]
    run = CliRunner().invoke(main, [*map(str, arguments), "--check-structured-output"])
    assert run.exit_code == 0, run.output
    assert run.output.count("4 output tokens, length") == 3
    assert "\ndrafts: " in run.output
    assert re.search(r"decode perplexity of \d+ given tokens: \d+\.\d{4}", run.output)
    assert run.output.count("  ok\n") == len(STRUCTURED_CASES)


@pytest.mark.parametrize("kind", ["predictor", "draft model"])
def test_perplexity_and_constraints_hold_with_drafts_of_the_models_own(kind: str, tmp_path: Path) -> None:
    text = " is billing because the customer was charged twice"
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"prompt": "the route", "continuation": text}))
    is_v3 = kind == "predictor"
    family, fields = ("deepseek_v3", {"has_predictor": True}) if is_v3 else ("qwen3", {})
    model = str(write_tiny_model(tmp_path / "model", family, **fields))
    arguments = ["--model", model, "--device", "cpu", "--dtype", "float32", "--max-model-len", "512"]
    arguments += ["--samples", str(samples), "--num-draft-tokens", "3", "--check-structured-output"]
    if not is_v3:
        arguments += ["--draft-model", str(write_tiny_drafter(tmp_path / "drafter"))]
    run = CliRunner().invoke(main, arguments)
    assert run.exit_code == 0, run.output
    assert run.output.count("  ok\n") == len(STRUCTURED_CASES)
    assert re.search(r"\ndrafts: \d+ of [1-9]\d* verified tokens accepted, by position \d+%, \d+%, \d+%", run.output)
    (golden,) = tokenize(model, [text])
    sampling = SamplingParams(golden_token_ids=golden, logprobs=True).sampling
    request = Request(request_id="1", text="the route", sampling=sampling, golden_token_ids=tuple(golden))
    ref = model_ref(model, dtype="float32", max_model_len=512)
    settings = EngineSettings(device="cpu", num_threads=1, kv_cache_gib=0.01, num_draft_tokens=0)
    done = run_all(Engine(ref, settings, load_parts(ref, settings)), [request])["1"]
    told = re.search(rf"decode perplexity of {len(golden)} given tokens: (\d+\.\d+)", run.output)
    assert told is not None
    assert float(told[1]) == pytest.approx(perplexity(done.logprobs or ()), rel=1e-3)


def test_drafts_are_told_by_position() -> None:
    beat = Heartbeat(
        phase="idle",
        num_output_tokens=12,
        num_draws=8,
        num_draft_tokens=5,
        num_accepted_tokens=3,
        drafts_by_position=(3, 2),
        accepted_by_position=(2, 1),
    )
    told = "3 of 5 verified tokens accepted, by position 67%, 50%; 1.50 output tokens per sequence and step"
    assert describe_drafts(beat) == told
    assert describe_drafts(Heartbeat(phase="idle")) == "none were verified"


def test_degrees_that_do_not_fit_are_said_without_a_traceback(tiny_model: Path) -> None:
    run = CliRunner().invoke(main, ["--model", str(tiny_model), "--ep", "2"])
    assert run.exit_code == 1
    assert "engine.expert_parallel 2 does not divide" in run.output


def test_a_bad_line_of_samples_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "a", "continuation": "b"}\n{"prompt": 3}\n')
    with pytest.raises(InputDataError, match="line 2"):
        read_samples(path)
