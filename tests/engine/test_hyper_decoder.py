"""DeepSeek V4 against transformers' modelling code, the oracle: tiny random checkpoints of every layer type in fp32.

The oracle pads on the left wrongly and so runs one sequence at a time.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models import compressed
from engine.models.hyper_decoder import HyperDecoder
from engine.models.spec import ModelSpec
from engine.topology import Topology
from engine.weights import load_model
from kernels.reference import ReferenceKernels
from schemas.errors import ModelError, SettingsError
from schemas.model_files import ModelFiles
from schemas.records import ModelRef
from tests.engine.test_decoder import CPU, TOLERANCE, expected_logits, random_ids
from tests.engine.test_parity import assert_greedy, make_engine, random_prompts, run
from tests.step_batches import BLOCK_SIZE, block_tables, step_batch
from tests.tiny_models import VOCAB_SIZE, write_tiny_tokenizer

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
VARIANTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "sliding": ([SLIDING], {}),
    "sparse": ([SPARSE], {}),
    "sparse-all-entries": ([SPARSE], {"index_topk": 64}),
    "heavy": ([HEAVY], {}),
    "all": ([SLIDING, SPARSE, HEAVY, SPARSE], {}),
    "yarn": (
        [SPARSE, HEAVY],
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32,
                "beta_slow": 1,
            }
        },
    ),
}


def write_oracle(directory: Path, kinds: list[str], overrides: dict[str, Any]) -> Any:
    """A random checkpoint, saved by transformers; what it makes zero is random too, or it would go untested."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        q_lora_rank=24,
        num_experts_per_tok=2,
        n_routed_experts=8,
        n_shared_experts=1,
        layer_types=kinds,
        mlp_layer_types=["hash_moe", *["moe"] * (len(kinds) - 1)] if len(kinds) > 1 else ["moe"],
        compress_rates={SPARSE: 4, HEAVY: 8},
        sliding_window=8,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=16,  # with few heads, many scores are exactly 0 and which entries are best is open
        index_head_dim=16,
        partial_rotary_factor=0.25,
        max_position_embeddings=512,
        swiglu_limit=0.5,  # so low that it matters
        initializer_range=0.2,
        pad_token_id=2,
        **{"index_topk": 4, **overrides},
    )
    model = DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias", ".base", "hc_base", "norm.weight", "scale")):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.stack([torch.randperm(8)[:2] for _ in range(VOCAB_SIZE)]))
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def load(directory: Path, **fields: Any) -> HyperDecoder:
    ref = ModelRef(name=str(directory), digest="0" * 16, dtype="float32", **fields)
    model = load_model(ModelFiles(directory, "huggingface"), ref, ReferenceKernels(CPU), CPU)
    assert isinstance(model, HyperDecoder)
    return model


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[HyperDecoder, Any]:
    directory = tmp_path_factory.mktemp("model")
    oracle = write_oracle(directory, *VARIANTS[request.param])
    return load(directory), oracle


def test_a_whole_prompt_has_the_oracles_logits_at_every_row(pair: tuple[HyperDecoder, Any]) -> None:
    model, oracle = pair
    ids = random_ids(65, seed=1)
    batch = step_batch([ids], [0], block_tables([65]), logits_rows=range(65))
    got = model.logits(model.forward(batch, model.alloc_cache(32, BLOCK_SIZE)))
    torch.testing.assert_close(got, expected_logits(oracle, ids), atol=TOLERANCE, rtol=0)


def test_chunks_then_decode_steps_have_the_oracles_logits(pair: tuple[HyperDecoder, Any]) -> None:
    model, oracle = pair
    ids, tables = random_ids(65, seed=2), block_tables([65], seed=3)
    expected, cache, start = expected_logits(oracle, ids), model.alloc_cache(32, BLOCK_SIZE), 0
    for size in (7, 1, 22, 1, 1, 16, *[1] * 17):
        logits = model.logits(model.forward(step_batch([ids[start : start + size]], [start], tables), cache))
        start += size
        torch.testing.assert_close(logits[0], expected[start - 1], atol=TOLERANCE, rtol=0)


def test_wrong_tokens_across_window_borders_are_overwritten(pair: tuple[HyperDecoder, Any]) -> None:
    model, oracle = pair
    ids, tables, cache = random_ids(65, seed=4), block_tables([65]), model.alloc_cache(32, BLOCK_SIZE)
    model.forward(step_batch([ids[:30]], [0], tables, logits_rows=[]), cache)
    model.forward(step_batch([random_ids(12, seed=5)], [30], tables, logits_rows=[]), cache)
    batch = step_batch([ids[30:]], [30], tables, logits_rows=range(35))
    got = model.logits(model.forward(batch, cache))
    torch.testing.assert_close(got, expected_logits(oracle, ids)[30:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("are_groups_small", [False, True])
def test_a_mixed_batch_with_a_shared_prefix_has_the_oracles_logits(
    pair: tuple[HyperDecoder, Any], are_groups_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if are_groups_small:
        monkeypatch.setattr(compressed, "MAX_GROUP_TOKENS", 60)
        monkeypatch.setattr(compressed, "MAX_GROUP_ROWS", 5)
    model, oracle = pair
    prefix = random_ids(24, seed=6)
    prompts = [prefix + random_ids(length, seed=length) for length in (9, 14, 5)]
    tables = block_tables([len(ids) for ids in prompts])
    shared = tables[0][: 24 // BLOCK_SIZE]
    tables = [[*shared, *table[len(shared) :]] for table in tables]
    cache = model.alloc_cache(40, BLOCK_SIZE)
    for prompt, table in zip(prompts[:2], tables, strict=False):
        model.forward(step_batch([prompt[:-1]], [0], [table], logits_rows=[]), cache)
    starts = [len(prompts[0]) - 1, len(prompts[1]) - 1, 24]
    batch = step_batch([ids[start:] for ids, start in zip(prompts, starts, strict=True)], starts, tables)
    expected = torch.stack([expected_logits(oracle, ids)[-1] for ids in prompts])
    torch.testing.assert_close(model.logits(model.forward(batch, cache)), expected, atol=TOLERANCE, rtol=0)


def published_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As DeepSeek names them, where transformers saves other names."""
    changes = (("model.", ""), ("embed_tokens", "embed"), ("lm_head", "head"), ("hc_head.hc_", "hc_head_"))
    renamed = {}
    for name, tensor in weights.items():
        for ours, theirs in (*changes, (".attn.norm.", ".attn.kv_norm.")):
            name = name.replace(ours, theirs)
        renamed[name] = tensor
    return renamed


def write_published_config(directory: Path, ratios: list[int], **fields: Any) -> None:
    """Rewrite config.json with the fields that DeepSeek uses; ``ratios`` go on with those of the drafting layers."""
    config = json.loads((directory / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters"):
        del config[name]
    config |= {"compress_ratios": [*ratios, 0], "num_hash_layers": 1, "qk_rope_head_dim": 8, "rope_scaling": None}
    (directory / "config.json").write_text(json.dumps(config | fields))


def test_published_fp8_and_fp4_blocks_are_what_their_scales_make_of_them(tmp_path: Path) -> None:
    oracle = write_oracle(tmp_path, [SLIDING, SPARSE], {})
    packed: dict[str, torch.Tensor] = {}
    dense = published_names(load_file(tmp_path / "model.safetensors"))
    for name, tensor in list(dense.items()):
        packed[name] = tensor
        if ".ffn.experts." in name:
            dense[name], codes, scales = as_fp4(tensor)
        elif re.search(r"\.(wq_[ab]|wkv|wo_[ab]|shared_experts\.w[123])\.weight$", name) and "compressor" not in name:
            dense[name], codes, scales = as_fp8(tensor)
        else:
            continue
        packed |= {name: codes, name.replace(".weight", ".scale"): scales}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}
    quantization["weight_block_size"] = [128, 128]  # type: ignore[assignment]
    write_published_config(tmp_path, [0, 4], expert_dtype="fp4", quantization_config=quantization)
    results = []
    for weights in (packed, dense):
        save_file(weights, tmp_path / "model.safetensors")
        model, batch = load(tmp_path), step_batch([random_ids(30, seed=7)], [0], block_tables([30]))
        results.append(model.logits(model.forward(batch, model.alloc_cache(10, BLOCK_SIZE)))[0])
    torch.testing.assert_close(*results, atol=0, rtol=0)
    assert not torch.equal(results[0], expected_logits(oracle, random_ids(30, seed=7))[-1])  # they were rounded


def as_fp8(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What it is rounded to, fp8 codes, and one power of two for all, as a tensor of less than a block has."""
    exponent = torch.floor(torch.log2(tensor.abs().max() / 448)) + 1
    codes = (tensor / 2**exponent).to(torch.float8_e4m3fn)
    shape = [-(-size // 128) for size in tensor.shape]
    scales = (2**exponent).expand(shape).contiguous().to(torch.float8_e8m0fnu)
    return codes.float() * 2**exponent, codes, scales


def as_fp4(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What it is rounded to, two codes a byte with the first in the lower half, a power of two for 32 of a row."""
    groups = tensor.unflatten(1, (-1, 32))
    scales = 2 ** torch.ceil(torch.log2(groups.abs().amax(dim=-1, keepdim=True) / 6))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = ((groups / scales)[..., None] - values).abs().argmin(dim=-1)
    pairs = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    packed = (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
    return (values[codes] * scales).flatten(1), packed, scales[..., 0].to(torch.float8_e8m0fnu)


def test_the_names_and_fields_of_a_published_checkpoint_are_read(tmp_path: Path) -> None:
    oracle = write_oracle(tmp_path, [SLIDING, SPARSE], {})
    weights = load_file(tmp_path / "model.safetensors")
    renamed = published_names(weights)
    assert "embed.weight" in renamed
    assert "layers.1.attn.kv_norm.weight" in renamed
    assert "layers.1.attn.indexer.compressor.ape" in renamed
    save_file(renamed | {"mtp.0.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    write_published_config(tmp_path, [0, 4])
    model, ids = load(tmp_path), random_ids(30, seed=7)
    batch = step_batch([ids], [0], block_tables([30]), logits_rows=range(30))
    got = model.logits(model.forward(batch, model.alloc_cache(10, BLOCK_SIZE)))
    torch.testing.assert_close(got, expected_logits(oracle, ids), atol=TOLERANCE, rtol=0)


def test_what_v4_cannot_be_run_with_yet_is_refused(tmp_path: Path) -> None:
    write_oracle(tmp_path, [SLIDING], {})
    for fields in ({"deterministic": True}, {"quantization": "fp8"}):
        with pytest.raises(ModelError, match=r"without fp8 products and --deterministic"):
            load(tmp_path, **fields)
    config = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(SettingsError, match=r"deepseek_v4 runs on one rank"):
        Topology(expert=2, data=1, context=2).check_model(ModelSpec.from_config(config))
    with pytest.raises(ModelError, match=r"'ratio 3'.* do not make 1 layers"):
        ModelSpec.from_config(config | {"layer_types": None, "compress_ratios": [3]})


def test_a_cache_takes_the_bytes_it_announces(tmp_path: Path) -> None:
    write_oracle(tmp_path, [SLIDING, SPARSE, HEAVY], {})
    model = load(tmp_path)
    cache = model.alloc_cache(5, 64)
    assert sum(layer.nbytes for layer in cache) == 5 * model.cache_bytes_per_block(64)


def test_packed_experts_without_fitting_scales_are_refused_by_name(tmp_path: Path) -> None:
    write_oracle(tmp_path, [SLIDING], {})
    weights, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.ffn.experts.3.w2.weight"
    weights[name] = torch.zeros(64, 16, dtype=torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"experts.3.w2.weight is of torch.int8 without scales"):
        load(tmp_path)
    weights[name.replace(".weight", ".scale")] = torch.ones(64, 2)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"fp4 scales of shape \(64, 2\) for 64 x 32: want \(64, 1\)"):
        load(tmp_path)


def test_an_engine_draws_the_oracles_tokens_in_chunks_with_prefix_hits_and_preemption(tmp_path: Path) -> None:
    oracle = write_oracle(tmp_path, [SLIDING, SPARSE, HEAVY], {})
    write_tiny_tokenizer(tmp_path)
    prompts = random_prompts([1 + (i * 13) % 40 for i in range(8)], VOCAB_SIZE, shared=40)
    engine = make_engine(
        str(tmp_path), 112, 128, block_size=8, max_num_seqs=6, max_num_batched_tokens=48, num_threads=1
    )
    for prompt, completion in zip(prompts, run(engine, prompts, 20), strict=True):
        assert_greedy(oracle, [prompt], [completion])
    assert engine.stats.num_preemptions
    assert engine.stats.num_cached_tokens
