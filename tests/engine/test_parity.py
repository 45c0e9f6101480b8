"""Greedy output equals transformers', token for token, however rows are batched, chunked and preempted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.draft import DraftSource
from engine.loop import Engine
from engine.parts import load_parts
from engine.weights import read_spec
from schemas.model_files import model_ref
from schemas.records import Completion, ConstraintKind, Request, Sampling
from schemas.records import Constraint as ConstraintRecord
from schemas.settings import EngineSettings
from tests.demo_model import demo_model
from tests.engine.fakes import run_all
from tests.engine.test_weights import all_logits, load
from tests.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model

NEAR_TIE = 1e-3
"""Other batch shapes sum in another order: two logits closer than this may change places."""


def make_engine(
    name: str,
    max_model_len: int,
    num_tokens: int = 0,
    *,
    dtype: str = "float32",
    deterministic: bool = False,
    draft_source: DraftSource | None = None,
    **settings: Any,
) -> Engine:
    """A real engine, on the CPU unless ``settings`` say otherwise; ``num_tokens`` limits its KV cache."""
    ref = model_ref(name, dtype=dtype, max_model_len=max_model_len, deterministic=deterministic)
    resolved = EngineSettings(**({"device": "cpu", "block_size": 16} | settings))
    parts = load_parts(ref, resolved)
    if draft_source:
        parts = replace(parts, draft_source=draft_source)
    if num_tokens:
        size_bytes = num_tokens // resolved.block_size * parts.model.cache_bytes_per_block(resolved.block_size)
        resolved = resolved.model_copy(update={"kv_cache_gib": size_bytes / 2**30})
    return Engine(ref, resolved, parts)


def random_prompts(lengths: list[int], vocab_size: int, shared: int = 0) -> list[list[int]]:
    """Random token ids; every other prompt begins with the same ``shared`` tokens."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randint(3, vocab_size, (shared,), generator=generator).tolist()
    own = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [(start if i % 2 else []) + tokens for i, tokens in enumerate(own)]


def run(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, logprobs=True)
    requests = [Request(request_id=str(i), token_ids=tuple(ids), sampling=sampling) for i, ids in enumerate(prompts)]
    done = run_all(engine, requests)
    return [done[request.request_id] for request in requests]


@torch.no_grad()
def assert_greedy(oracle: Any, prompts: list[list[int]], completions: list[Completion]) -> None:
    """Each output token is the oracle's argmax after the tokens before it, which is what its own greedy run gives.

    The oracle reads sixteen rows at once; nothing that it says of a token depends on the padding behind it.
    """
    rows = list(zip(prompts, completions, strict=True))
    for start in range(0, len(rows), 16):
        some = rows[start : start + 16]
        texts = [torch.tensor([*prompt, *completion.token_ids]) for prompt, completion in some]
        logits = oracle(torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)).logits.float()
        for each, text, (prompt, completion) in zip(logits, texts, some, strict=True):
            assert completion.token_ids, completion.error
            assert_greedy_row(each[len(prompt) - 1 : len(text) - 1], completion)


def assert_greedy_row(logits: torch.Tensor, completion: Completion) -> None:
    """``logits`` [T, V] are the oracle's before each of the T output tokens."""
    chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    gap = logits.max(dim=-1).values - chosen
    assert gap.max() <= NEAR_TIE, f"token {int(gap.argmax())} is {float(gap.max()):.4f} below the oracle's"
    expected = chosen - logits.logsumexp(dim=-1)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-2, rtol=0)


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    from transformers import AutoModelForCausalLM

    directory = write_tiny_model(tmp_path_factory.mktemp("model"), request.param)
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return str(directory), oracle


def test_tiny_models_equal_the_oracle_with_chunks_prefix_hits_and_preemption(tiny: tuple[str, Any]) -> None:
    name, oracle = tiny
    prompts = random_prompts([1 + (i * 13) % 50 for i in range(24)], VOCAB_SIZE, shared=40)
    engine = make_engine(
        name, 128, num_tokens=400, block_size=8, max_num_seqs=16, max_num_batched_tokens=48, num_threads=1
    )
    done = run(engine, prompts, max_tokens=16)
    assert_greedy(oracle, prompts, done)
    assert engine.stats.num_preemptions > 0
    assert engine.stats.num_cached_tokens > 0
    assert any(len(prompt) > 48 for prompt in prompts)


def test_the_same_rows_give_the_same_tokens_in_every_arrangement(tiny: tuple[str, Any]) -> None:
    name, _ = tiny
    prompts = random_prompts([3, 60, 17, 31, 1, 44], VOCAB_SIZE, shared=24)
    arrangements = [
        {"max_num_seqs": 1},
        {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        {"max_num_seqs": 8, "max_num_batched_tokens": 11, "prefix_cache": False},
        {"max_num_seqs": 4, "block_size": 3},
        {"max_num_seqs": 4, "block_size": 64},
    ]
    outputs = [
        [c.token_ids for c in run(make_engine(name, 128, num_threads=1, **settings), prompts, 12)]
        for settings in arrangements
    ]
    assert all(output == outputs[0] for output in outputs)


def test_a_real_tokenizer_is_steered_and_its_text_is_what_the_grammar_saw(tiny: tuple[str, Any]) -> None:
    name, _ = tiny
    engine = make_engine(name, 128, num_threads=1)
    constraint = ConstraintRecord(kind=ConstraintKind.CHOICE, source='["billing", "bug", "other reason"]')
    engine.add_constraint(constraint)
    sampling = Sampling(max_tokens=30, temperature=1.0)
    requests = [
        Request(request_id=str(i), text="route: ", seed=i, sampling=sampling, constraint_key=constraint.key)
        for i in range(12)
    ]
    done = run_all(engine, requests)
    assert {c.finish_reason for c in done.values()} == {"stop"}
    assert {c.text for c in done.values()} <= {"billing", "bug", "other reason"}


@pytest.fixture(scope="module")
def demo_oracle() -> Any:
    files = demo_model()
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=read_spec(files).num_layers))
    checkpoint = load_gguf_checkpoint(str(files.path), return_tensors=True, model_to_load=names)
    oracle = LlamaForCausalLM(LlamaConfig(**checkpoint["config"]))
    missing, unexpected = oracle.load_state_dict(checkpoint["tensors"], strict=False)
    assert missing == ["lm_head.weight"], "it is tied to the embedding"
    assert not unexpected
    return oracle.float().eval()


@pytest.mark.slow
def test_the_demo_model_has_the_logits_of_transformers_gguf_route(demo_oracle: Any) -> None:
    files = demo_model()
    ids = torch.randint(20, 49152, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        wanted = demo_oracle(torch.tensor([ids])).logits[0]
    model = load(files.path)
    assert model.spec == read_spec(files)
    torch.testing.assert_close(all_logits(model, ids), wanted, atol=1e-3, rtol=1e-4)


@pytest.mark.slow
def test_the_demo_model_equals_the_oracle_on_64_prompts_in_one_continuous_batch(demo_oracle: Any) -> None:
    lengths = [1 + (i * 29) % 17 for i in range(64)]
    prompts = random_prompts(lengths, vocab_size=49152, shared=16)
    engine = make_engine("smollm2", 512, num_tokens=3000, max_num_seqs=64, max_num_batched_tokens=512)
    done = run(engine, prompts, max_tokens=8)
    assert_greedy(demo_oracle, prompts, done)
    assert engine.stats.num_cached_tokens >= 31 * 16
    assert engine.stats.num_steps < 40
