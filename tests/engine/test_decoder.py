"""The native decoder against transformers' modelling code, the oracle, on tiny random checkpoints in fp32."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.models.decoder import Decoder
from engine.weights import load_model
from kernels.reference import ReferenceKernels
from schemas.model_files import ModelFiles
from schemas.records import ModelRef
from tests.step_batches import BLOCK_SIZE, block_tables, step_batch
from tests.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model

TOLERANCE = 1e-4
CPU = torch.device("cpu")

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {family: (family, {}) for family in FAMILIES} | {
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-yarn": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen3-untied": ("qwen3", {"tie_word_embeddings": False}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen3-moe-every-other-layer": (
        "qwen3_moe",
        {"mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "v2-biases": ("deepseek_v2_lite", {"attention_bias": True, "mlp_bias": True, "rope_scaling": None}),
    "v3-halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False, "attention_bias": True}),
    "v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_scaling": None}),
}


def load_tiny(directory: Path, dtype: str = "float32") -> Decoder:
    ref = ModelRef(name=str(directory), digest="0" * 16, dtype=dtype)  # type: ignore[arg-type]
    kernels = ReferenceKernels(CPU, getattr(torch, dtype))
    model = load_model(ModelFiles(directory, "huggingface"), ref, kernels, CPU)
    assert isinstance(model, Decoder)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, Any]:
    from transformers import AutoModelForCausalLM

    family, overrides = VARIANTS[request.param]
    directory = write_tiny_model(tmp_path_factory.mktemp("model"), family, **overrides)
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return load_tiny(directory), oracle


def expected_logits(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return oracle(torch.tensor([token_ids])).logits[0].float()


def random_ids(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_a_whole_prompt_has_the_oracles_logits_at_every_row(pair: tuple[Decoder, Any]) -> None:
    model, oracle = pair
    ids = random_ids(61, seed=1)
    cache = model.alloc_cache(32, BLOCK_SIZE)
    batch = step_batch([ids], [0], block_tables([61]), logits_rows=range(61))
    torch.testing.assert_close(
        model.logits(model.forward(batch, cache)), expected_logits(oracle, ids), atol=TOLERANCE, rtol=0
    )


def test_chunks_then_decode_steps_have_the_oracles_logits(pair: tuple[Decoder, Any]) -> None:
    model, oracle = pair
    ids = random_ids(45, seed=2)
    expected = expected_logits(oracle, ids)
    cache, tables = model.alloc_cache(32, BLOCK_SIZE), block_tables([45], seed=3)
    start = 0
    for size in (7, 1, 16, 5, *[1] * 16):
        logits = model.logits(model.forward(step_batch([ids[start : start + size]], [start], tables), cache))
        start += size
        torch.testing.assert_close(logits[0], expected[start - 1], atol=TOLERANCE, rtol=0)


def test_a_mixed_batch_has_the_oracles_logits(pair: tuple[Decoder, Any]) -> None:
    model, oracle = pair
    prefix = random_ids(16, seed=4)
    prompts = [prefix + random_ids(length, seed=length) for length in (5, 17, 3, 9, 4, 30, 12)]
    cached = [20, 32, 18, 24, 19, 0, 22]  # five decodes, of which the first five share a prefix; then two prefills
    tables = block_tables([len(ids) for ids in prompts], seed=5)
    tables = [[*tables[0][: 16 // BLOCK_SIZE], *table[16 // BLOCK_SIZE :]] for table in tables]
    tables[5] = block_tables([46], seed=6)[0]
    tables[5] = [block + 100 for block in tables[5]]
    cache = model.alloc_cache(150, BLOCK_SIZE)
    for ids, num_cached, table in zip(prompts, cached, tables, strict=True):
        if num_cached:
            model.forward(step_batch([ids[:num_cached]], [0], [table], logits_rows=[]), cache)
    batch = step_batch([ids[n:] for ids, n in zip(prompts, cached, strict=True)], cached, tables)
    assert batch.attention.num_decodes == 5
    logits = model.logits(model.forward(batch, cache))
    expected = torch.stack([expected_logits(oracle, ids)[-1] for ids in prompts])
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2_lite", "deepseek_v3"])
def test_a_checkpoint_that_transformers_saved_is_read(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_tiny_model(tmp_path / "ours", family)
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    oracle.save_pretrained(tmp_path / "theirs")
    model, ids = load_tiny(tmp_path / "theirs"), random_ids(20, seed=8)
    batch = step_batch([ids], [0], block_tables([20]), logits_rows=range(20))
    got = model.logits(model.forward(batch, model.alloc_cache(8, BLOCK_SIZE)))
    torch.testing.assert_close(got, expected_logits(oracle, ids), atol=TOLERANCE, rtol=0)


def test_hidden_states_come_for_logit_rows_only(tmp_path: Path) -> None:
    model = load_tiny(write_tiny_model(tmp_path))
    cache = model.alloc_cache(8, BLOCK_SIZE)
    batch = step_batch([random_ids(9, seed=0)], [0], block_tables([9]), logits_rows=[3, 8])
    assert model.forward(batch, cache).shape == (2, 64)
    empty = step_batch([random_ids(9, seed=0)], [0], block_tables([9]), logits_rows=[])
    assert model.logits(model.forward(empty, cache)).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(("family", "values_per_token"), [("llama", 2 * 2 * 2 * 16), ("deepseek_v3", 3 * (32 + 8))])
def test_a_cache_takes_the_bytes_it_announces(tmp_path: Path, family: str, values_per_token: int) -> None:
    model = load_tiny(write_tiny_model(tmp_path, family), "bfloat16")
    cache = model.alloc_cache(5, 64)
    assert sum(layer.nbytes for layer in cache) == 5 * model.cache_bytes_per_block(64) == 5 * 64 * 2 * values_per_token


@pytest.mark.parametrize(
    ("family", "unrecordable", "is_recordable"),
    [
        ("qwen3", {"attention"}, False),
        ("qwen3", {"latent_attention", "experts_mlp"}, True),
        ("qwen3_moe", {"experts_mlp"}, False),
        ("deepseek_v2", {"latent_attention"}, False),
        ("deepseek_v2", {"attention"}, True),
    ],
)
def test_decode_steps_are_recorded_only_if_all_their_operations_can_be(
    tmp_path: Path, family: str, unrecordable: set[str], is_recordable: bool
) -> None:
    class SomeKernels(ReferenceKernels):
        @property
        def unrecordable(self) -> frozenset[str]:
            return frozenset(unrecordable)

    directory = write_tiny_model(tmp_path, family)
    ref = ModelRef(name=str(directory), digest="0" * 16, dtype="float32")
    model = load_model(ModelFiles(directory, "huggingface"), ref, SomeKernels(), CPU)
    assert model.is_recordable == is_recordable
    assert model.max_mixed_rows == 0, "the reference's attention reads the lengths of runs"


@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen2", "bfloat16"), ("qwen2", "float16"), ("deepseek_v2_lite", "bfloat16")]
)
def test_half_precision_stays_close_to_fp32(tmp_path: Path, family: str, dtype: str) -> None:
    directory = write_tiny_model(tmp_path, family)
    ids, tables = random_ids(40, seed=7), block_tables([40])
    wanted, got = (
        model.logits(model.forward(step_batch([ids], [0], tables, logits_rows=range(40)), model.alloc_cache(16, 4)))
        for model in (load_tiny(directory), load_tiny(directory, dtype))
    )
    assert got.dtype == torch.float32
    assert (got - wanted).abs().mean() < 0.1 * wanted.abs().mean()


def test_a_cache_on_a_cpu_takes_memory_only_where_it_is_written(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    model, process = load_tiny(tmp_path, "bfloat16"), psutil.Process()
    num_blocks = 2**30 // model.cache_bytes_per_block(BLOCK_SIZE)
    before = process.memory_info().rss
    cache = model.alloc_cache(num_blocks, BLOCK_SIZE)
    assert process.memory_info().rss - before < 2**26
    assert sum(layer.nbytes for layer in cache) > 2**29
    assert all(layer.dtype is torch.bfloat16 and not layer[..., -1].any() for layer in cache)
