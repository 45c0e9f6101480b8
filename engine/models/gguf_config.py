"""GGUF metadata rewritten as a config.json; refuses what has no counterpart there. Knows no tensors."""

from collections.abc import Mapping
from typing import Any

from schemas.errors import ModelError

_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_GGUF_FIELDS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
"""Fields of config.json and their GGUF names after the architecture's prefix."""

_GGUF_CHECKED = (
    "vocab_size",
    "rope.dimension_count",
    "attention.value_length",
    "rope.scaling.type",
    "rope.scaling.factor",
)


def config_of_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> dict[str, Any]:
    """Rewrite GGUF metadata as a config.json. Raises ModelError for what has no counterpart there."""
    architecture = str(metadata.get("general.architecture"))
    if architecture not in _GGUF_ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {architecture!r} is not implemented; known: {', '.join(_GGUF_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
    for name, value in fields.items():
        if name not in (*_GGUF_FIELDS.values(), *_GGUF_CHECKED):
            raise ModelError(f"GGUF field {prefix}{name}={value!r} is not understood and could change the result")
    if "rope_freqs.weight" in tensor_names:
        raise ModelError(
            "GGUF tensor rope_freqs.weight (scaled rotary frequencies) is not implemented: use another format"
        )
    config = {name: fields[gguf_name] for name, gguf_name in _GGUF_FIELDS.items() if gguf_name in fields}
    config |= {
        "model_type": architecture,
        "vocab_size": fields.get("vocab_size") or len(metadata.get("tokenizer.ggml.tokens", ())),
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in tensor_names,
        "rope_scaling": _gguf_rope_scaling(fields),
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name in ("rope.dimension_count", "attention.value_length"):
        if fields.get(name, head_dim) != head_dim:
            raise ModelError(
                f"GGUF field {prefix}{name}={fields[name]!r} is not implemented, only the head size {head_dim}"
            )
    return config


def _gguf_rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(f"GGUF rope scaling {kind!r} is not implemented: use safetensors")
    return {"rope_type": "linear", "factor": float(fields["rope.scaling.factor"])}
