"""Reading config.json: what is understood, what is harmless, what is refused by name."""

from typing import Any

import pytest

from engine.models.spec import ModelSpec
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
    assert spec.qk_norm == (family == "qwen3")
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
        ("llama", {"num_key_value_heads": 3}, "over 3 key-value heads do not divide"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, not None"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
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
