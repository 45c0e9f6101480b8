"""The bound of a workload: parameters as a real model has them, work as a plain count gives it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ops.bench.roofline import Costs, Rates, RowWork, decode_seconds, prefill_seconds, roofline
from ops.bench.workloads import QWEN3, SHAPES

CONFIG = QWEN3 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": False,
}
RATES = Rates(flops_per_s=1e6, bytes_per_s=1e6)


def test_parameters_and_cache_are_those_of_the_model() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**CONFIG))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    head = linears.pop("lm_head")
    costs = Costs.of(CONFIG)
    assert costs.body_parameters == sum(module.weight.numel() for module in linears.values())
    assert costs.head_parameters == head.weight.numel()
    assert costs.cache_bytes == 3 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("shape", ["DeepSeek-V2-Lite", "DeepSeek-V3-slice"])
def test_deepseeks_parameters_are_those_of_the_model(shape: str) -> None:
    config = SHAPES[shape]
    fields = {name: value for name, value in config.items() if name not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **fields))
    by_name = {name: each.numel() for name, each in model.named_parameters() if "norm" not in name}
    head, embedding = by_name.pop("lm_head.weight"), by_name.pop("model.embed_tokens.weight")
    routed = sum(count for name, count in by_name.items() if ".experts." in name)
    costs = Costs.of(config)
    assert costs.head_parameters == head == embedding
    assert costs.expert_parameters * costs.num_experts == routed
    assert costs.body_parameters == sum(by_name.values()) - routed
    assert costs.read_parameters(1) == pytest.approx(costs.token_parameters())
    assert costs.read_parameters(10_000) == pytest.approx(costs.body_parameters + routed)


def test_v4s_parameters_are_those_of_the_model() -> None:
    config = SHAPES["DeepSeek-V4-slice"]
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    left_out = ("model_type", "architectures", "compress_ratios", "num_hash_layers", "qk_rope_head_dim")
    fields = {name: value for name, value in config.items() if name not in left_out}
    fields["layer_types"] = [kinds[ratio] for ratio in config["compress_ratios"]]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v4", **fields))
    by_name = {
        name: each.numel()
        for name, each in model.named_parameters()
        if each.dim() > 1 and not name.endswith("position_bias")
    }
    head, embedding = by_name.pop("lm_head.weight"), by_name.pop("model.embed_tokens.weight")
    routed = sum(count for name, count in by_name.items() if ".experts." in name)
    costs = Costs.of(config)
    assert costs.head_parameters == head == embedding
    assert costs.expert_parameters * costs.num_experts == routed
    assert costs.body_parameters == sum(by_name.values()) - routed


def test_a_window_is_read_up_to_its_size() -> None:
    costs = Costs(0, 0, 2.0, 3, window=5, window_width=7.0, window_bytes=11)
    rows = [RowWork(8, 2, 3)]
    pairs, seen = sum(range(3, 9)), 3 + 4 + 5 * 4
    assert prefill_seconds(costs, RATES, rows) == pytest.approx(4 * (2 * pairs + 7 * seen) / 1e6)
    assert decode_seconds(costs, Rates(1e12, 1e6), rows) == pytest.approx((3 * (9 + 10) + 11 * 5 * 2) / 1e6)


def test_bounds_equal_a_plain_count() -> None:
    costs = Costs.of(CONFIG)
    rows = [RowWork(10, 4, 3), RowWork(7, 0, 1)]
    pairs = sum(range(5, 11)) + sum(range(1, 8))  # keys that each own token sees
    wanted = 2 * (6 + 7) * costs.body_parameters + 4 * costs.attention_width * pairs
    assert prefill_seconds(costs, RATES, rows) == pytest.approx(wanted / 1e6)
    weights = 2 * (costs.body_parameters + costs.head_parameters)
    steps = [weights + costs.cache_bytes * (10 + step) for step in (1, 2)]  # by bytes: at one row they cost more
    assert decode_seconds(costs, Rates(1e12, 1e6), rows) == pytest.approx(sum(steps) / 1e6)


def test_constrained_rows_are_bound_by_their_prompts_alone() -> None:
    rows = [RowWork(10, 4, 3)]
    free, constrained = (roofline(CONFIG, RATES, rows, 2.0, is_free=is_free) for is_free in (True, False))
    assert constrained["decode_bound_s"] == 0.0 < free["decode_bound_s"]
    assert constrained["share_of_bound"] == pytest.approx(prefill_seconds(Costs.of(CONFIG), RATES, rows) / 2)
