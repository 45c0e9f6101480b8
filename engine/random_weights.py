"""Weights for benchmarks: random, from nothing but a model's sizes. Knows no files."""

import hashlib
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.models.spec import ModelSpec
from engine.shards import Part, cut

RANDOM_STD = 0.02
ROUTER_SKEW = 0.5
"""How much larger the first expert's row of a skewed router is than the last one's: it is picked more often."""


class RandomWeights:
    """The WeightSource of a benchmark: normal weights made on the device, norms of one, biases of zero."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, router_skew: float = 0.0) -> None:
        """``router_skew``: how much larger a router's first row is than its last one."""
        self._shapes = _compressed_shapes(spec) if spec.compressed else _shapes(spec)
        self._num_experts = spec.compressed.num_experts if spec.compressed else 0
        self._device, self._dtype = device, dtype
        self._router_skew = router_skew

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part | None = None) -> Tensor:
        """See WeightSource.get; seeded by the name, so that the order of asking and other parts do not matter."""
        kind = name if name in self._shapes else re.sub(r"^model\.layers\.\d+\.|(?<=experts\.)\d+\.", "", name)
        weight = torch.empty(self._shapes[kind], dtype=dtype or self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return weight.fill_(1.0)
        if name.endswith("bias"):
            return cut(weight.zero_(), part)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        generator = torch.Generator(self._device).manual_seed(seed)
        if name.endswith("tid2eid"):  # of each token, experts that differ
            first = weight[:, :1].random_(0, self._num_experts, generator=generator)
            return (first + torch.arange(weight.shape[1], device=self._device)) % self._num_experts
        weight.normal_(0.0, RANDOM_STD, generator=generator)
        if self._router_skew and kind.endswith(".gate.weight"):
            weight *= torch.linspace(1 + self._router_skew, 1, len(weight), device=self._device)[:, None]
        return cut(weight, part)

    def leave(self, prefix: str) -> None:
        """See WeightSource.leave; what is not asked for is not made."""


def _shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Shapes of all weights; of a layer's, and of an expert's, once for all of them."""
    hidden = spec.hidden_size
    linears: dict[str, tuple[int, ...]] = {"lm_head": (spec.vocab_size, hidden)} | _attention_linears(spec)
    linears |= _mlp_linears("mlp.", hidden, spec.intermediate_size)
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "model.norm": hidden}
    norms |= {"self_attn.q_norm": spec.head_dim, "self_attn.k_norm": spec.head_dim}
    if spec.latent:
        norms |= {"self_attn.q_a_layernorm": spec.latent.q_rank or 0, "self_attn.kv_a_layernorm": spec.latent.kv_rank}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    if experts := spec.experts:
        linears |= _mlp_linears("mlp.experts.", hidden, experts.intermediate_size)
        linears |= _mlp_linears("mlp.shared_experts.", hidden, experts.shared_size)
        linears["mlp.gate"] = (experts.num_experts, hidden)
        shapes["mlp.gate.e_score_correction_bias"] = (experts.num_experts,)
    return (
        shapes
        | {f"{name}.weight": shape for name, shape in linears.items()}
        | {f"{name}.bias": shape[:1] for name, shape in linears.items()}
        | {f"{name}.weight": (size,) for name, size in norms.items()}
    )


def _mlp_linears(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    up, down = (inner, hidden), (hidden, inner)
    return {f"{prefix}gate_proj": up, f"{prefix}up_proj": up, f"{prefix}down_proj": down}


def _attention_linears(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, heads = spec.hidden_size, spec.num_heads
    if (latent := spec.latent) is None:
        q_size, kv_size = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        shapes = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
        shapes["o_proj"] = (hidden, q_size)
    else:
        q_size, q_rank = heads * (latent.key_size + latent.rope_size), latent.q_rank or 0
        shapes = {
            "q_proj": (q_size, hidden),
            "q_a_proj": (q_rank, hidden),
            "q_b_proj": (q_size, q_rank),
            "kv_a_proj_with_mqa": (latent.kv_rank + latent.rope_size, hidden),
            "kv_b_proj": (heads * (latent.key_size + latent.value_size), latent.kv_rank),
            "o_proj": (hidden, heads * latent.value_size),
        }
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _compressed_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Shapes of DeepSeek V4's weights, of an expert's once for all of a layer."""
    compressed = spec.compressed
    assert compressed is not None, "only DeepSeek V4 has these"
    hidden, num_streams = spec.hidden_size, compressed.hyper.num_streams
    table = (spec.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": table, "head.weight": table, "norm.weight": (hidden,)}
    shapes |= _mix_shapes("hc_head_", num_streams, num_streams * hidden, num_scales=1)
    for index in range(spec.num_layers):
        layer = f"layers.{index}."
        shapes |= {f"{layer}attn.{name}": shape for name, shape in _compressed_attention_shapes(spec, index).items()}
        for part in ("attn", "ffn"):
            num_mixed = num_streams * (num_streams + 2)
            shapes |= _mix_shapes(f"{layer}hc_{part}_", num_mixed, num_streams * hidden, num_scales=3)
            shapes[f"{layer}{part}_norm.weight"] = (hidden,)
        shapes[f"{layer}ffn.gate.weight"] = (compressed.num_experts, hidden)
        shapes[f"{layer}ffn.gate.bias"] = (compressed.num_experts,)
        shapes[f"{layer}ffn.gate.tid2eid"] = (spec.vocab_size, compressed.gate.num_selected)
        for prefix in ("experts.", "shared_experts."):
            up, down = (spec.intermediate_size, hidden), (hidden, spec.intermediate_size)
            shapes |= {f"{layer}ffn.{prefix}{name}.weight": up for name in ("w1", "w3")}
            shapes[f"{layer}ffn.{prefix}w2.weight"] = down
    return shapes


def _mix_shapes(prefix: str, num_mixed: int, width: int, *, num_scales: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}fn": (num_mixed, width), f"{prefix}base": (num_mixed,), f"{prefix}scale": (num_scales,)}


def _compressed_attention_shapes(spec: ModelSpec, index: int) -> dict[str, tuple[int, ...]]:
    compressed = spec.compressed
    assert compressed is not None, "only DeepSeek V4 has these"
    hidden, head, width = spec.hidden_size, spec.head_dim, spec.num_heads * spec.head_dim
    projected = compressed.output_groups * compressed.output_rank
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a.weight": (compressed.q_rank, hidden),
        "wq_b.weight": (width, compressed.q_rank),
        "wkv.weight": (head, hidden),
        "wo_a.weight": (projected, width // compressed.output_groups),
        "wo_b.weight": (hidden, projected),
        "q_norm.weight": (compressed.q_rank,),
        "kv_norm.weight": (head,),
        "attn_sink": (spec.num_heads,),
    }
    is_sparse, rate = index in compressed.sparse_layers, compressed.layer_rates[index]
    if rate:
        shapes |= _compressor_shapes("compressor.", hidden, head, rate, overlaps=is_sparse)
    if is_sparse:
        queries = compressed.index_heads * compressed.index_size
        shapes["indexer.wq_b.weight"] = (queries, compressed.q_rank)
        shapes["indexer.weights_proj.weight"] = (compressed.index_heads, hidden)
        shapes |= _compressor_shapes("indexer.compressor.", hidden, compressed.index_size, rate, overlaps=True)
    return shapes


def _compressor_shapes(prefix: str, hidden: int, size: int, rate: int, *, overlaps: bool) -> dict[str, tuple[int, ...]]:
    width = size * (1 + overlaps)
    down = {f"{prefix}{name}.weight": (width, hidden) for name in ("wkv", "wgate")}
    return down | {f"{prefix}ape": (rate, width), f"{prefix}norm.weight": (size,)}
