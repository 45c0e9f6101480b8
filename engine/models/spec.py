"""What a checkpoint's architecture is, read from config.json or GGUF metadata; refuses what it does not understand.

A field that could change the result and is not implemented is a ModelError, never ignored. Knows no tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.compressed_spec import CompressedSpec, v4_rope
from engine.models.config import RopeSpec, count
from engine.models.gguf_config import config_of_gguf
from kernels.api import Gate, Scoring
from schemas.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v4")

# fmt: off
_HARMLESS = frozenset({
    "architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "_name_or_path", "name_or_path", "attention_dropout", "hidden_dropout", "resid_pdrop", "pretraining_tp",
    "is_llama_config", "auto_map", "unsloth_version", "unsloth_fixed", "transformers.js_config", "return_dict",
    "output_attentions", "output_hidden_states", "tokenizer_class", "problem_type", "id2label", "label2id",
    "chunk_size_feed_forward", "is_encoder_decoder", "_attn_implementation", "_attn_implementation_internal",
    "task_specific_params", "model_max_length", "pad_token", "bos_token", "eos_token", "aux_loss_alpha", "seq_aux",
    "router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "ep_size",
})
"""Fields that never change a forward pass of an architecture that we run."""

_UNDERSTOOD = frozenset({
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_interleaved", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias",
    "use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "partial_rotary_factor",
    "quantization_config",
})
"""Fields that ``ModelSpec.from_config`` reads or checks for every architecture."""

_DEEPSEEK = frozenset({
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim",
    "rope_interleave", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size",
    "first_k_dense_replace", "moe_layer_freq", "n_group", "topk_group", "topk_method", "scoring_func",
    "norm_topk_prob", "routed_scaling_factor",
})
_UNDERSTOOD_BY = {
    "qwen3_moe": frozenset({
        "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
        "decoder_sparse_step", "mlp_only_layers",
    }),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK | {"num_nextn_predict_layers", "num_mtp_layers"},
    "deepseek_v4": frozenset({
        "q_lora_rank", "qk_rope_head_dim", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
        "moe_intermediate_size", "scoring_func", "norm_topk_prob", "routed_scaling_factor", "num_nextn_predict_layers",
        "compress_rates", "compress_ratios", "compress_rope_theta", "hc_mult", "hc_sinkhorn_iters", "hc_eps",
        "mlp_layer_types", "num_hash_layers", "swiglu_limit", "o_groups", "o_lora_rank", "index_n_heads",
        "index_head_dim", "index_topk", "topk_method", "expert_dtype", "first_k_dense_replace",
    }),
}
"""Fields that it reads or checks for one architecture more."""

_ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "": {"hidden_act": ("silu",), "rope_interleaved": (False,), "partial_rotary_factor": (1.0,)},
    "deepseek_v2": {
        "scoring_func": ("softmax",),
        "topk_method": ("greedy", "group_limited_greedy"),
        "moe_layer_freq": (1,),
        "norm_topk_prob": (False,),  # transformers ignores it, DeepSeek's own code does not
    },
    "deepseek_v3": {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    "deepseek_v4": {
        "hidden_act": ("silu",),
        "scoring_func": ("sqrtsoftplus",),
        "topk_method": ("noaux_tc",),
        "norm_topk_prob": (True,),
        "n_shared_experts": (1,),
        "num_key_value_heads": (1,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "expert_dtype": (None, "fp4", "fp8"),  # the tensors themselves show it
        "first_k_dense_replace": (0,),
    },
}
"""The only values that are implemented, the default first; under "" for every architecture."""
# fmt: on


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: what is cached of a token is one latent and one rotated key for all heads."""

    q_rank: int | None  # queries pass through a latent of their own, or not
    kv_rank: int
    key_size: int  # of a head, without its rotated part
    rope_size: int
    value_size: int
    is_interleaved: bool  # the checkpoint's rotary pairs are neighbours, not halves

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "LatentSpec":
        """Read a DeepSeek config. Raises ModelError."""
        num_heads = count(config, "num_attention_heads")
        if config.get("num_key_value_heads", num_heads) != num_heads:
            raise ModelError("config.json: latent attention needs as many num_key_value_heads as num_attention_heads")
        spec = cls(
            q_rank=count(config, "q_lora_rank") if config.get("q_lora_rank") is not None else None,
            kv_rank=count(config, "kv_lora_rank"),
            key_size=count(config, "qk_nope_head_dim"),
            rope_size=count(config, "qk_rope_head_dim"),
            value_size=count(config, "v_head_dim"),
            is_interleaved=bool(config.get("rope_interleave", True)),
        )
        query_size = spec.key_size + spec.rope_size
        if config.get("qk_head_dim", query_size) != query_size or spec.rope_size % 2:
            raise ModelError(f"config.json: query heads of {spec.key_size} + {spec.rope_size} do not fit qk_head_dim")
        return spec


@dataclass(frozen=True)
class ExpertSpec:
    """The feed-forward part of sparse layers."""

    num_experts: int
    intermediate_size: int  # of one expert
    shared_size: int  # inner size of the expert that sees every row; 0: none
    gate: Gate
    has_gate_bias: bool  # scores have a bias for picking experts
    layers: frozenset[int]  # the sparse ones; the others have a dense feed-forward part

    @classmethod
    def from_config(cls, config: Mapping[str, Any], architecture: str, num_layers: int) -> "ExpertSpec":
        """Read a DeepSeek or Qwen3-MoE config. Raises ModelError."""
        is_qwen = architecture == "qwen3_moe"
        name = "num_experts" if config.get("num_experts") else "num_local_experts"
        num_experts = count(config, name if is_qwen else "n_routed_experts")
        size = count(config, "moe_intermediate_size")
        gate = _gate(config, architecture)
        group_size, is_uneven = divmod(num_experts, gate.num_groups)
        num_open = gate.num_groups_selected * group_size
        if is_uneven or gate.num_groups_selected > gate.num_groups or gate.num_selected > num_open:
            raise ModelError(
                f"config.json: {gate.num_selected} of {num_experts} experts do not fit {gate.num_groups_selected} of "
                f"{gate.num_groups} groups"
            )
        return cls(
            num_experts=num_experts,
            intermediate_size=size,
            shared_size=0 if is_qwen else size * int(config.get("n_shared_experts") or 0),
            gate=gate,
            has_gate_bias=architecture == "deepseek_v3",
            layers=frozenset(
                _sparse_layers(config, num_layers) if is_qwen else _layers_after_dense(config, num_layers)
            ),
        )


def _gate(config: Mapping[str, Any], architecture: str) -> Gate:
    num_selected = count(config, "num_experts_per_tok")
    if architecture == "qwen3_moe":
        return Gate(Scoring.SOFTMAX, num_selected, is_normalized=bool(config.get("norm_topk_prob")))
    scale = config.get("routed_scaling_factor")
    if not isinstance(scale, int | float):
        raise ModelError(f"config.json: routed_scaling_factor must be a number, not {scale!r}")
    if architecture == "deepseek_v3":
        groups = count(config, "n_group"), count(config, "topk_group")
        return Gate(Scoring.SIGMOID, num_selected, *groups, 2, bool(config.get("norm_topk_prob", True)), float(scale))
    is_grouped = config.get("topk_method") == "group_limited_greedy"
    groups = (count(config, "n_group"), count(config, "topk_group")) if is_grouped else (1, 1)
    return Gate(Scoring.SOFTMAX, num_selected, *groups, scale=float(scale))


def _layers_after_dense(config: Mapping[str, Any], num_layers: int) -> range:
    num_dense = config.get("first_k_dense_replace")
    if not isinstance(num_dense, int) or num_dense < 0:
        raise ModelError(f"config.json: first_k_dense_replace must be a number of layers, not {num_dense!r}")
    return range(num_dense, num_layers)


def _sparse_layers(config: Mapping[str, Any], num_layers: int) -> list[int]:
    step, dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    return [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]


V41_IS_MISSING = (
    "model_type 'deepseek_v41' is not implemented: it needs keys shared between layers (YOCO), entries of one and two "
    "tokens, candidate blocks for the index, keys in fp4, hashed n-gram embeddings (engram) and shifted "
    "hyper-connections, beside weights in fp8 blocks of 32 and fp4; ops/runbook.md has the account"
)


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder."""

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
    latent: LatentSpec | None = None  # else grouped attention; its rotated part is head_dim
    experts: ExpertSpec | None = None
    compressed: CompressedSpec | None = None  # DeepSeek V4, whose experts are described here too
    num_mtp_layers: int = 0  # the checkpoint may hold so many layers more, which draft tokens
    fp8_block: tuple[int, int] | None = None  # rows and columns that share a scale, in a checkpoint with fp8 weights

    @property
    def sliding_window(self) -> int | None:
        """The widest window if every layer has one: older keys are never read again."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Read a config.json. Raises ModelError naming a field that is missing, unknown or not implemented."""
        architecture = str(config.get("model_type"))
        if architecture == "deepseek_v41":
            raise ModelError(V41_IS_MISSING)
        if architecture not in ARCHITECTURES:
            raise ModelError(f"model_type {architecture!r} is not implemented; known: {', '.join(ARCHITECTURES)}")
        _check_fields(config, architecture)
        is_v4 = architecture == "deepseek_v4"
        is_latent = architecture in ("deepseek_v2", "deepseek_v3")
        num_heads, num_layers = count(config, "num_attention_heads"), count(config, "num_hidden_layers")
        has_bias = bool(config.get("attention_bias"))
        return cls(
            architecture=architecture,
            vocab_size=count(config, "vocab_size"),
            hidden_size=count(config, "hidden_size"),
            intermediate_size=count(config, "moe_intermediate_size" if is_v4 else "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=_head_dim(config, architecture),
            rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
            rope=v4_rope(config, "main") if is_v4 else RopeSpec.from_config(config),
            max_position_embeddings=count(config, "max_position_embeddings"),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=has_bias or architecture == "qwen2",
            output_bias=has_bias and architecture != "qwen2",
            mlp_bias=bool(config.get("mlp_bias")),
            qk_norm=architecture.startswith("qwen3"),
            layer_windows=(None,) * num_layers if is_v4 else _layer_windows(config, architecture, num_layers),
            latent=LatentSpec.from_config(config) if is_latent else None,
            experts=ExpertSpec.from_config(config, architecture, num_layers)
            if architecture == "qwen3_moe" or is_latent
            else None,
            compressed=CompressedSpec.from_config(config, num_layers) if is_v4 else None,
            num_mtp_layers=int(config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0),
            fp8_block=_fp8_block(config),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: frozenset[str]) -> "ModelSpec":
        """Read GGUF metadata; ``tensor_names`` tell what the metadata leave out (tied head, biases)."""
        return cls.from_config(config_of_gguf(metadata, tensor_names))


def _check_fields(config: Mapping[str, Any], architecture: str) -> None:
    understood = _UNDERSTOOD | _UNDERSTOOD_BY.get(architecture, frozenset())
    for name, value in config.items():
        is_off = value is None or value is False or value in ({}, [])
        if name in understood or name in _HARMLESS or name.endswith(("_token_id", "_token_ids")) or is_off:
            continue
        raise ModelError(f"config.json: field {name}={value!r} is not understood and could change the result")
    shared = {} if architecture == "deepseek_v4" else _ALLOWED[""]
    for name, allowed in (shared | _ALLOWED.get(architecture, {})).items():
        if config.get(name, allowed[0]) not in allowed:
            only = " or ".join(map(repr, allowed))
            raise ModelError(f"config.json: {name}={config[name]!r} is not implemented, only {only}")


def _fp8_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Read quantization_config: DeepSeek's fp8 weights with one scale a block, or none."""
    if not config.get("quantization_config"):
        return None
    fields = dict(config["quantization_config"])
    block = fields.pop("weight_block_size", None)
    wanted = {"quant_method": ("fp8",), "fmt": (None, "e4m3"), "scale_fmt": (None, "ue8m0")}
    is_known = all(fields.pop(name, None) in values for name, values in wanted.items())
    fields = {name: value for name, value in fields.items() if name not in _HARMLESS_IN_FP8 and value}
    if not is_known or fields or not isinstance(block, list) or len(block) != 2:
        raise ModelError(
            f"config.json: quantization_config={config['quantization_config']!r} is not implemented, only fp8 (e4m3) "
            "with a weight_block_size of two numbers"
        )
    return int(block[0]), int(block[1])


_HARMLESS_IN_FP8 = ("activation_scheme", "modules_to_not_convert", "ignored_layers")
"""How activations would be quantised, which ours are not, and what the tensors themselves show."""


def _head_dim(config: Mapping[str, Any], architecture: str) -> int:
    if architecture == "deepseek_v4":
        return count(config, "head_dim")
    if architecture.startswith("deepseek"):
        return count(config, "qk_rope_head_dim")
    hidden_size, num_heads = count(config, "hidden_size"), count(config, "num_attention_heads")
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
    first = int(config.get("max_window_layers") or 0) if architecture in ("qwen2", "qwen3") else 0
    applies = architecture in ("mistral", "qwen2", "qwen3", "qwen3_moe")
    return tuple(window if applies and layer >= first else None for layer in range(num_layers))
