"""Tiny random checkpoints and a tiny byte-level tokenizer: tests run the real loading code in milliseconds.

Weights have a standard deviation of 0.2: with the usual 0.02 the logits are nearly flat and any bug passes a tolerance.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 320
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
"""Ids of the special tokens; ``IM_END`` ends a turn and is the end token of generation_config.json."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = [
    'the route is "billing" because the customer was charged twice',
    '{"route": "bug", "reason": "the application crashes"}',
    '{"route": "other", "reason": "no reason was given"}',
    "true false null 0.5 100 2026",
]

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": IM_START,
    "eos_token_id": IM_END,
    "dtype": "float32",
}

_DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""One dense layer, then two with experts; more experts are picked than a group holds."""

_DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
    },
    "llama3": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "smollm2": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 32,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "mistral": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 16,
        "rope_theta": 10000.0,
        "sliding_window": 24,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 32,
        "rope_theta": 1000000.0,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v2_lite": {
        **_DEEPSEEK,
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **_DEEPSEEK,
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_shared_experts": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    },
}

FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The content of config.json for a family; ``overrides`` replace or add fields."""
    return {**_SHARED, **_FAMILIES[family], **overrides}


def write_tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a complete Hugging Face directory (config, weights, tokenizer, chat template) and return it.

    With ``has_predictor=True`` the checkpoint holds the layer that its config.json speaks of.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, dtype=str(dtype).removeprefix("torch."), **overrides)
    written = {name: value for name, value in config.items() if name != "has_predictor"}
    (directory / "config.json").write_text(json.dumps(written, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END], "bos_token_id": IM_START}))
    _save(directory, {name: tensor.to(dtype) for name, tensor in tiny_weights(config, seed).items()}, num_shards)
    write_tiny_tokenizer(directory)
    return directory


def write_tiny_drafter(directory: Path, family: str = "qwen3", *, seed: int = 7, **fields: Any) -> Path:
    """Write a block drafter (DSpark) for the tiny model of ``family``: config and weights as DeepSpec saves them."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_drafter_config(family, **fields)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    _save(directory, tiny_drafter_weights(config, seed), 1)
    return directory


def tiny_drafter_config(family: str = "qwen3", **fields: Any) -> dict[str, Any]:
    """The content of its config.json: that of its target with fewer layers, and its own fields."""
    target = tiny_config(family)
    own = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "head_dim": 32,
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "tie_word_embeddings": False,
        "block_size": 5,
        "mask_token_id": VOCAB_SIZE - 1,
        "target_layer_ids": [-1, 0],
        "num_anchors": 512,
        "markov_rank": 12,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return target | own | fields


def tiny_drafter_weights(config: dict[str, Any], seed: int = 7) -> dict[str, torch.Tensor]:
    """Random fp32 weights under the names of DeepSpec's checkpoints; those of its target are there too, and wrong."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name.removeprefix("model."): shape for name, shape in _shapes(config).items()}
    shapes |= _drafter_shapes(config)
    return {name: torch.randn(shape, generator=generator) * 0.2 + _mean(name) for name, shape in shapes.items()}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + _mean(name) for name, shape in _shapes(config).items()
    }


def _mean(name: str) -> float:
    """Norms are near 1; a router's bias is so low that groups masked with 0 instead of -inf would win."""
    return 1.0 if name.endswith("norm.weight") else -1.0 if name.endswith("e_score_correction_bias") else 0.0


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of 320 entries: three special tokens, 256 bytes and merges of a small corpus."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def write_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with a chat template."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    attention = _latent_shapes if config.get("kv_lora_rank") else _attention_shapes
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in attention(config).items()}
        shapes |= {f"{prefix}mlp.{name}": shape for name, shape in _mlp_shapes(config, layer).items()}
        shapes |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    if config.get("has_predictor"):
        shapes |= _predictor_shapes(config)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _predictor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The layer behind the last one, with the copies of embedding and head that published checkpoints have."""
    hidden, layer = config["hidden_size"], config["num_hidden_layers"]
    parts = {f"self_attn.{name}": shape for name, shape in _latent_shapes(config).items()}
    parts |= {f"mlp.{name}": shape for name, shape in _mlp_shapes(config, layer).items()}
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    parts |= {f"{name}.weight": (hidden,) for name in norms}
    parts |= {"eh_proj.weight": (hidden, 2 * hidden)}
    parts |= dict.fromkeys(("embed_tokens.weight", "shared_head.head.weight"), (config["vocab_size"], hidden))
    return {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}


def _drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, rank, vocab = config["hidden_size"], config["markov_rank"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, hidden * len(config["target_layer_ids"])),
        "hidden_norm.weight": (hidden,),
    }
    if rank:
        shapes |= dict.fromkeys(("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"), (vocab, rank))
    inner = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, hidden + 2 * rank)}
    if rank and (found := inner.get(config["markov_head_type"])):
        name, size_out, size_in = found
        shapes |= {f"markov_head.{name}.weight": (size_out, size_in), f"markov_head.{name}.bias": (size_out,)}
    if config["enable_confidence_head"]:
        size_in = hidden + (rank if config["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, size_in), "confidence_head.proj.bias": (1,)}
    return shapes


def _attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_size = config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"o_proj.weight": (hidden, heads * head_dim)}
    for name, size in (("q", heads * head_dim), ("k", kv_size), ("v", kv_size)):
        shapes[f"{name}_proj.weight"] = (size, hidden)
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            shapes[f"{name}_proj.bias"] = (size,)
    if config.get("attention_bias"):
        shapes["o_proj.bias"] = (hidden,)
    if config["model_type"].startswith("qwen3"):
        shapes |= {f"{name}_norm.weight": (head_dim,) for name in "qk"}
    return shapes


def _latent_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    q_size = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + config["qk_rope_head_dim"], hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), rank),
        "o_proj.weight": (hidden, heads * config["v_head_dim"]),
    }
    if config["q_lora_rank"] is None:
        shapes["q_proj.weight"] = (q_size, hidden)
    else:
        q_rank = config["q_lora_rank"]
        shapes |= {"q_a_proj.weight": (q_rank, hidden), "q_a_layernorm.weight": (q_rank,)}
        shapes["q_b_proj.weight"] = (q_size, q_rank)
    if config.get("attention_bias"):
        biased = ("kv_a_proj_with_mqa", "o_proj") + (("q_a_proj",) if config["q_lora_rank"] else ())
        shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}
    return shapes


def _mlp_shapes(config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    num_experts = config.get("num_experts") or config.get("n_routed_experts")
    has_bias = config.get("mlp_bias", False)
    is_dense = layer in config.get("mlp_only_layers", ()) or layer < config.get("first_k_dense_replace", 0)
    if not num_experts or is_dense or (layer + 1) % config.get("decoder_sparse_step", 1):
        return _gated_shapes("", hidden, config["intermediate_size"], has_bias=has_bias)
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (num_experts, hidden)}
    if config["model_type"] == "deepseek_v3":
        shapes["gate.e_score_correction_bias"] = (num_experts,)
    inner = config["moe_intermediate_size"]
    for expert in range(num_experts):
        shapes |= _gated_shapes(f"experts.{expert}.", hidden, inner)
    if num_shared := config.get("n_shared_experts"):
        shapes |= _gated_shapes("shared_experts.", hidden, inner * num_shared, has_bias=has_bias)
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int, *, has_bias: bool = False) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    shapes[f"{prefix}down_proj.weight"] = (hidden, inner)
    if has_bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in list(shapes.items())}
    return shapes


def _save(directory: Path, weights: dict[str, torch.Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(weights)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::num_shards]}
        save_file(part, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
