"""A dense decoder over flat rows: Llama, SmolLM2, Mistral, Qwen2 and Qwen3, told apart by their ModelSpec alone.

Shape legend: N rows, L logit rows, H query heads, G key-value heads, D head size. Knows no requests and no files.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import StepBatch
from engine.models.layers import Rotary
from engine.models.spec import ModelSpec
from kernels.api import Kernels


class WeightSource(Protocol):
    """Named weights in the model's dtype on its device."""

    def get(self, name: str) -> Tensor:
        """Return the tensor of that Hugging Face name. Raises ModelError if there is none."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights; the linear ones packed by the kernels, q, k, v and gate, up fused."""

    input_norm: Tensor
    qkv: Any
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Any
    mlp_norm: Tensor
    gate_up: Any
    down: Any
    window: int | None


class DenseModel:
    """Implements engine.models.Model."""

    def __init__(self, spec: ModelSpec, source: WeightSource, kernels: Kernels) -> None:
        self.spec = spec
        self._kernels = kernels
        self._embedding = source.get("model.embed_tokens.weight")
        self._device, self._dtype = self._embedding.device, self._embedding.dtype
        self._layers = [_load_layer(spec, index, source, kernels) for index in range(spec.num_layers)]
        self._final_norm = source.get("model.norm.weight")
        head = self._embedding if spec.tie_embeddings else source.get("lm_head.weight")
        self._head = kernels.pack_weight(head)
        self._rotary = Rotary(spec.rope, spec.head_dim, self._device, self._dtype)
        self._sizes = [
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
        ]

    def alloc_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """See Model.alloc_cache."""
        shape = (2, num_blocks, block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return [torch.zeros(shape, dtype=self._dtype, device=self._device) for _ in self._layers]

    def cache_bytes_per_block(self, block_size: int) -> int:
        """See Model.cache_bytes_per_block."""
        spec = self.spec
        return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * self._dtype.itemsize

    @torch.no_grad()
    def forward(self, batch: StepBatch, cache: list[Tensor]) -> Tensor:
        """See Model.forward; rows without logits leave the last layer after its attention."""
        kernels, eps = self._kernels, self.spec.rms_norm_eps
        cos_sin = self._rotary(batch.positions)
        residual = functional.embedding(batch.input_ids, self._embedding)
        hidden = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = self._attend(layer, hidden, cos_sin, batch, cache[index])
            is_last = index + 1 == len(self._layers)
            if is_last:
                attended, residual = attended[batch.logits_rows], residual[batch.logits_rows]
            update = kernels.linear(attended, layer.output)
            hidden, residual = kernels.add_rms_norm(update, residual, layer.mlp_norm, eps)
            update = kernels.linear(kernels.silu_mul(kernels.linear(hidden, layer.gate_up)), layer.down)
            next_norm = self._final_norm if is_last else self._layers[index + 1].input_norm
            hidden, residual = kernels.add_rms_norm(update, residual, next_norm, eps)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return self._kernels.linear(hidden, self._head).float()

    def _attend(
        self, layer: Layer, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], batch: StepBatch, cache: Tensor
    ) -> Tensor:
        """Attention of normed rows ``hidden`` [N, hidden] before the output projection: [N, H * D]."""
        kernels, spec = self._kernels, self.spec
        parts = kernels.linear(hidden, layer.qkv).split(self._sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in parts)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, spec.rms_norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, spec.rms_norm_eps)
        q, k = kernels.rotary(q, k, *cos_sin)
        kernels.write_kv(cache, batch.attention.slots, k, v)
        out = kernels.attention(q, cache, batch.attention, scale=spec.head_dim**-0.5, window=layer.window)
        return out.flatten(1)


def _load_layer(spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels) -> Layer:
    prefix = f"model.layers.{index}."

    def pack(names: tuple[str, ...], has_bias: bool) -> Any:
        weight = torch.cat([source.get(f"{prefix}{name}.weight") for name in names])
        bias = torch.cat([source.get(f"{prefix}{name}.bias") for name in names]) if has_bias else None
        return kernels.pack_weight(weight, bias)

    return Layer(
        input_norm=source.get(prefix + "input_layernorm.weight"),
        qkv=pack(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), spec.qkv_bias),
        q_norm=source.get(prefix + "self_attn.q_norm.weight") if spec.qk_norm else None,
        k_norm=source.get(prefix + "self_attn.k_norm.weight") if spec.qk_norm else None,
        output=pack(("self_attn.o_proj",), spec.output_bias),
        mlp_norm=source.get(prefix + "post_attention_layernorm.weight"),
        gate_up=pack(("mlp.gate_proj", "mlp.up_proj"), spec.mlp_bias),
        down=pack(("mlp.down_proj",), spec.mlp_bias),
        window=spec.layer_windows[index],
    )
