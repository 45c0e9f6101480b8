"""What a checkpoint's architecture is, read from config.json or GGUF metadata; refuses what it does not understand.

A field that could change the result and is not implemented is a ModelError, never ignored. Knows no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# fmt: off
_HARMLESS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "_name_or_path", "name_or_path", "attention_dropout", "hidden_dropout", "resid_pdrop", "pretraining_tp",
    "is_llama_config", "auto_map", "unsloth_version", "unsloth_fixed", "transformers.js_config", "return_dict",
    "output_attentions", "output_hidden_states", "tokenizer_class", "problem_type", "id2label", "label2id",
    "chunk_size_feed_forward", "is_encoder_decoder", "_attn_implementation", "_attn_implementation_internal",
    "task_specific_params", "model_max_length", "pad_token", "bos_token", "eos_token",
})
"""Fields that never change a forward pass of an architecture that we run."""

_UNDERSTOOD = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_interleaved", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "partial_rotary_factor",
})
"""Fields that ``ModelSpec.from_config`` reads or checks."""
# fmt: on


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base and scaling, in the names of config.json; lengths in tokens."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: None means 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the bounds of the ramp

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RopeSpec":
        """Read rope_parameters (transformers 5), or rope_theta and rope_scaling; an unknown one is a ModelError."""
        values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
        values.pop("type", None)
        theta = values.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        if kind not in ROPE_TYPES:
            raise ModelError(f"config.json: rope type {kind!r} is not implemented; known: {', '.join(ROPE_TYPES)}")
        known = {name: values.pop(name) for name in _ROPE_FIELDS[kind] if values.get(name) is not None}
        original = values.pop("original_max_position_embeddings", None) or config.get("max_position_embeddings") or 0
        for name, value in values.items():
            if value not in (None, 1.0 if name in ("partial_rotary_factor", "factor") else None):
                raise ModelError(f"config.json: rope field {name}={value!r} is not implemented for rope type {kind!r}")
        return cls(theta=float(theta), kind=kind, original_max_positions=int(original), **known)


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a dense decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMSNorm over each head of q and k, before the rotary embedding
    layer_windows: tuple[int | None, ...]  # keys that a layer's rows see, themselves included; None: all

    @property
    def sliding_window(self) -> int | None:
        """The widest window if every layer has one: older keys are never read again."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read a config.json. Raises ModelError naming a field that is missing, unknown or not implemented."""
        architecture = str(config.get("model_type"))
        if architecture not in ARCHITECTURES:
            raise ModelError(f"model_type {architecture!r} is not implemented; known: {', '.join(ARCHITECTURES)}")
        _check_fields(config)
        num_heads, num_layers = _count(config, "num_attention_heads"), _count(config, "num_hidden_layers")
        has_bias = bool(config.get("attention_bias"))
        return cls(
            architecture=architecture,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=_count(config, "hidden_size"),
            intermediate_size=_count(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=_head_dim(config, architecture),
            rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=RopeSpec.from_config(config),
            max_position_embeddings=_count(config, "max_position_embeddings"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or architecture == "qwen2",
            output_bias=has_bias and architecture != "qwen2",
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=architecture == "qwen3",
            layer_windows=_layer_windows(config, architecture, num_layers),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> "ModelSpec":
        """Read GGUF metadata; ``tensor_names`` tell what the metadata leave out (tied head, biases)."""
        return cls.from_config(_config_of_gguf(metadata, tensor_names))


def _check_fields(config: Mapping[str, Any]) -> None:
    for name, value in config.items():
        is_off = value is None or value is False or value in ({}, [])
        if name in _UNDERSTOOD or name in _HARMLESS or name.endswith(("_token_id", "_token_ids")) or is_off:
            continue
        raise ModelError(f"config.json: field {name}={value!r} is not understood and could change the result")
    wanted = {"hidden_act": ("silu",), "rope_interleaved": (False,), "partial_rotary_factor": (1.0,)}
    for name, allowed in wanted.items():
        if config.get(name, allowed[0]) not in allowed:
            raise ModelError(f"config.json: {name}={config[name]!r} is not implemented, only {allowed[0]!r}")


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _head_dim(config: Mapping[str, Any], architecture: str) -> int:
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    head_dim = int(config.get("head_dim") or (128 if architecture == "qwen3" else hidden_size // num_heads))
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if head_dim % 2 or num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: {num_heads} heads of {head_dim} over {num_kv_heads} key-value heads do not divide"
        )
    return head_dim


def _layer_windows(config: Mapping[str, Any], architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if architecture.startswith("qwen") and not config.get("use_sliding_window"):
        window = None
    if kinds := config.get("layer_types"):
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != num_layers:
            raise ModelError(f"config.json: layer_types of {num_layers} layers not understood: {kinds!r}")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get("max_window_layers") or 0) if architecture.startswith("qwen") else 0
    applies = architecture in ("mistral", "qwen2", "qwen3")
    return tuple(window if applies and layer >= first else None for layer in range(num_layers))


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


def _config_of_gguf(metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> dict[str, Any]:
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
