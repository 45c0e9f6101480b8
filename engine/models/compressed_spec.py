"""What DeepSeek V4 has beside the sizes that all models have, read from its config.json. Knows no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import RopeSpec, count
from kernels.api import Gate, Scoring
from schemas.errors import ModelError


@dataclass(frozen=True)
class HyperSpec:
    """Hyper-connections: residual streams that are mixed before and after each part of a layer."""

    num_streams: int
    num_iterations: int  # of Sinkhorn
    eps: float


@dataclass(frozen=True)
class CompressedSpec:
    """What DeepSeek V4 has beside sizes that all models have."""

    layer_rates: tuple[int, ...]  # tokens that an entry of the layer stands for; 0: a window of tokens only
    sparse_layers: frozenset[int]  # those whose rows attend to the best entries only
    window: int
    rope: RopeSpec  # of layers with entries; the others have the model's own
    rope_size: int
    q_rank: int
    output_groups: int
    output_rank: int  # of each group
    index_heads: int
    index_size: int  # of a head
    index_topk: int
    hyper: HyperSpec
    gate: Gate
    num_experts: int
    hash_layers: frozenset[int]  # whose experts are looked up by token
    activation_limit: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any], num_layers: int) -> "CompressedSpec":
        """Read a DeepSeek V4 config. Raises ModelError."""
        kinds, mlp_kinds = _v4_layers(config, num_layers)
        default = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
        rates = default | dict(config.get("compress_rates") or {})
        return cls(
            layer_rates=tuple(int(rates[kind]) for kind in kinds),
            sparse_layers=frozenset(i for i, kind in enumerate(kinds) if kind == "compressed_sparse_attention"),
            window=count(config, "sliding_window"),
            rope=v4_rope(config, "compress"),
            rope_size=_v4_rope_size(config),
            q_rank=count(config, "q_lora_rank"),
            output_groups=count(config, "o_groups"),
            output_rank=count(config, "o_lora_rank"),
            index_heads=count(config, "index_n_heads"),
            index_size=count(config, "index_head_dim"),
            index_topk=count(config, "index_topk"),
            hyper=HyperSpec(
                count(config, "hc_mult"), count(config, "hc_sinkhorn_iters"), float(config.get("hc_eps") or 1e-6)
            ),
            gate=Gate(
                Scoring.SQRT_SOFTPLUS,
                count(config, "num_experts_per_tok"),
                is_normalized=True,
                scale=float(config.get("routed_scaling_factor") or 1.0),
            ),
            num_experts=count(config, "n_routed_experts"),
            hash_layers=frozenset(i for i, kind in enumerate(mlp_kinds) if kind == "hash_moe"),
            activation_limit=float(config.get("swiglu_limit") or 10.0),
        )


def _v4_layers(config: Mapping[str, Any], num_layers: int) -> tuple[list[str], list[str]]:
    """Kinds of attention and of feed-forward parts, as transformers writes them or as DeepSeek does."""
    by_ratio = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    ratios = list(config.get("compress_ratios") or ())[:num_layers]
    kinds = list(config.get("layer_types") or (by_ratio.get(ratio, f"ratio {ratio}") for ratio in ratios))
    num_hash = int(config.get("num_hash_layers") or 0)
    mlp_kinds = list(config.get("mlp_layer_types") or (["hash_moe"] * num_hash + ["moe"] * (num_layers - num_hash)))
    unknown = (set(kinds) - set(by_ratio.values())) | (set(mlp_kinds) - {"hash_moe", "moe"})
    if unknown or len(kinds) != num_layers or len(mlp_kinds) != num_layers:
        raise ModelError(
            f"config.json: attention {kinds!r} and experts {mlp_kinds!r} do not make {num_layers} layers of "
            f"{', '.join(by_ratio.values())} with hash_moe or moe"
        )
    return kinds, mlp_kinds


def _v4_rope_size(config: Mapping[str, Any]) -> int:
    size = config.get("qk_rope_head_dim") or int(config["head_dim"] * (config.get("partial_rotary_factor") or 0))
    if not isinstance(size, int) or size < 2 or size % 2:
        raise ModelError(f"config.json: qk_rope_head_dim must be an even number of rotated dimensions, not {size!r}")
    return size


def v4_rope(config: Mapping[str, Any], kind: str) -> RopeSpec:
    """The rotary embedding of layers with entries ("compress") or without ("main"); only the former is scaled."""
    own, is_scaled = config.get("rope_parameters") or config.get("rope_scaling") or {}, kind == "compress"
    theta = config.get("compress_rope_theta" if is_scaled else "rope_theta")
    values = dict(own.get(kind) or (own if is_scaled else {}) | {"rope_theta": theta})
    values.pop("partial_rotary_factor", None)
    if "yarn" in (values.get("rope_type"), values.get("type")):
        values["attention_factor"] = 1.0
    return RopeSpec.from_config({**config, "rope_parameters": values})
