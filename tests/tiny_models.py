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
    """Write a complete Hugging Face directory (config, weights, tokenizer, chat template) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, dtype=str(dtype).removeprefix("torch."), **overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END], "bos_token_id": IM_START}))
    _save(directory, {name: tensor.to(dtype) for name, tensor in tiny_weights(config, seed).items()}, num_shards)
    write_tiny_tokenizer(directory)
    return directory


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random fp32 weights under their Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in _shapes(config).items()
    }


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
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (size, hidden)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (size,)
        if config.get("attention_bias"):
            shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
        if config.get("mlp_bias"):
            shapes |= {f"{prefix}mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
            shapes[f"{prefix}mlp.down_proj.bias"] = (hidden,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
        shapes |= {
            f"{prefix}self_attn.o_proj.weight": (hidden, q_size),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
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
