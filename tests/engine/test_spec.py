"""Reading config.json: what is understood, what is harmless, what is refused by name."""

from typing import Any

import pytest

from engine.models.spec import LatentSpec, ModelSpec
from kernels.api import Gate, Scoring
from schemas.errors import ModelError
from tests.tiny_models import FAMILIES, tiny_config

QWEN3_4B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

LLAMA31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}


QWEN3_30B_A3B = QWEN3_4B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}

DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": None,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}


def test_published_configs_of_sparse_models_are_read() -> None:
    qwen, v3, lite = (ModelSpec.from_config(c) for c in (QWEN3_30B_A3B, DEEPSEEK_V3, DEEPSEEK_V2_LITE))
    assert qwen.experts is not None
    assert v3.experts is not None
    assert lite.experts is not None
    assert qwen.latent is None
    assert qwen.experts.gate == Gate(Scoring.SOFTMAX, 8, is_normalized=True)
    assert (qwen.experts.layers, qwen.experts.shared_size) == (frozenset(range(48)), 0)
    assert v3.latent == LatentSpec(1536, 512, 128, 64, 128, is_interleaved=True)
    assert v3.experts.gate == Gate(Scoring.SIGMOID, 8, 8, 4, 2, is_normalized=True, scale=2.5)
    assert (v3.experts.layers, v3.experts.shared_size, v3.experts.has_gate_bias) == (
        frozenset(range(3, 61)),
        2048,
        True,
    )
    assert (v3.num_mtp_layers, v3.fp8_block, v3.head_dim) == (1, (128, 128), 64)
    assert lite.latent == LatentSpec(None, 512, 128, 64, 128, is_interleaved=True)
    assert lite.experts.gate == Gate(Scoring.SOFTMAX, 6)
    assert (lite.experts.shared_size, lite.num_mtp_layers, lite.fp8_block) == (2816, 0, None)


def test_published_configs_are_read() -> None:
    qwen, llama = ModelSpec.from_config(QWEN3_4B), ModelSpec.from_config(LLAMA31_8B)
    assert (qwen.head_dim, qwen.qk_norm, qwen.tie_embeddings, qwen.qkv_bias) == (128, True, True, False)
    assert qwen.sliding_window is None
    assert (llama.head_dim, llama.num_kv_heads, llama.rope.kind) == (128, 8, "llama3")
    assert (llama.rope.theta, llama.rope.factor, llama.rope.original_max_positions) == (500000.0, 8.0, 8192)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tiny_family_is_read(family: str) -> None:
    spec = ModelSpec.from_config(tiny_config(family))
    assert spec.qkv_bias == (family == "qwen2")
    assert spec.qk_norm == family.startswith("qwen3")
    assert spec.sliding_window == (24 if family == "mistral" else None)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llama", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50.0 is not understood"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 0.7}}, "mscale=0.7"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"model_type": "gemma3"}, "model_type 'gemma3' is not implemented; known: llama"),
        ("llama", {"model_type": "deepseek_v41"}, r"'deepseek_v41' is not implemented: it needs .*YOCO.*engram"),
        ("llama", {"num_key_value_heads": 3}, "over 3 key-value heads do not divide"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, not None"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ("llama", {"n_routed_experts": 8}, "n_routed_experts=8 is not understood"),
        ("qwen3_moe", {"n_group": 2}, "n_group=2 is not understood"),
        ("qwen3_moe", {"num_experts": None}, "num_local_experts must be a positive integer"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts do not fit 1 of 1 groups"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not implemented, only False"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "only 'greedy' or 'group_limited_greedy'"),
        ("deepseek_v2", {"routed_scaling_factor": None}, "routed_scaling_factor must be a number, not None"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"n_group": 3}, "3 of 8 experts do not fit 2 of 3 groups"),
        ("deepseek_v3", {"topk_group": 1}, "3 of 8 experts do not fit 1 of 4 groups"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "first_k_dense_replace must be a number of layers, not None"),
        ("deepseek_v3", {"index_topk": 64}, "index_topk=64 is not understood"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "as many num_key_value_heads as num_attention_heads"),
        ("deepseek_v3", {"qk_head_dim": 32}, "do not fit qk_head_dim"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "'awq'.* only fp8"),
    ],
)
def test_what_could_change_the_result_is_refused_by_name(family: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_config(tiny_config(family, **overrides))


def test_unknown_fields_that_are_off_are_accepted() -> None:
    config = tiny_config("llama", new_feature=None, other_feature=False, decoder_start_token_id=3, extra={})
    assert ModelSpec.from_config(config) == ModelSpec.from_config(tiny_config("llama"))


def test_windows_are_per_layer() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8}
    by_name = tiny_config("qwen2", layer_types=["full_attention", "sliding_attention"], **windows)
    by_count = tiny_config("qwen2", max_window_layers=1, **windows)
    for config in (by_name, by_count):
        spec = ModelSpec.from_config(config)
        assert spec.layer_windows == (None, 8)
        assert spec.sliding_window is None


def test_a_gguf_field_that_is_not_understood_is_refused() -> None:
    metadata = {"general.architecture": "llama", "llama.expert_count": 8}
    with pytest.raises(ModelError, match=r"llama.expert_count=8 is not understood"):
        ModelSpec.from_gguf(metadata, frozenset())
    with pytest.raises(ModelError, match="GGUF architecture 'gemma3'"):
        ModelSpec.from_gguf({"general.architecture": "gemma3"}, frozenset())
