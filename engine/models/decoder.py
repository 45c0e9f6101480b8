"""The decoder that all families share: embedding, layers of attention and feed-forward, final norm, head.

The spec decides which attention and which feed-forward a layer has; neither knows the other.
Shape legend: N rows, L logit rows. Knows no requests and no files.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import StepBatch
from engine.models import WeightSource
from engine.models.deepseek import LatentAttention
from engine.models.dense import GatedMlp, GroupedAttention
from engine.models.layers import Rotary
from engine.models.moe import SparseMlp
from engine.models.spec import ModelSpec
from kernels.api import AttentionBatch, Kernels


class Attention(Protocol):
    """One layer's attention with its weights; ``output`` is its packed output projection."""

    output: Any

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the layer's cache tensor; a block takes the same bytes at any ``num_blocks``."""

    def __call__(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], batch: AttentionBatch, cache: Tensor) -> Tensor:
        """Write normed rows ``hidden`` [N, hidden] to the cache and attend: [N, width], before ``output``."""


class FeedForward(Protocol):
    """One layer's feed-forward part with its weights."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Normed rows [N, hidden] -> [N, hidden]."""


@dataclass(frozen=True)
class Layer:
    """One layer's parts."""

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: FeedForward


class Decoder:
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
        operations = {"latent_attention" if spec.latent else "attention"} | ({"experts_mlp"} if spec.experts else set())
        self.is_recordable = kernels.unrecordable.isdisjoint(operations)
        self.is_recordable_mixed = self.is_recordable and kernels.decode_only.isdisjoint(operations)
        self._rotary = Rotary(spec.rope, spec.head_dim, self._device, self._dtype)

    def alloc_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """See Model.alloc_cache."""
        shapes = [layer.attention.cache_shape(num_blocks, block_size) for layer in self._layers]
        return [_zeros(shape, self._dtype, self._device) for shape in shapes]

    def cache_bytes_per_block(self, block_size: int) -> int:
        """See Model.cache_bytes_per_block."""
        num_values = sum(prod(layer.attention.cache_shape(1, block_size)) for layer in self._layers)
        return num_values * self._dtype.itemsize

    @torch.no_grad()
    def forward(self, batch: StepBatch, cache: list[Tensor]) -> Tensor:
        """See Model.forward; rows without logits leave the last layer after its attention."""
        kernels, eps = self._kernels, self.spec.rms_norm_eps
        cos_sin = self._rotary(batch.positions)
        residual = functional.embedding(batch.input_ids, self._embedding)
        hidden = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = layer.attention(hidden, cos_sin, batch.attention, cache[index])
            is_last = index + 1 == len(self._layers)
            if is_last:
                attended, residual = attended[batch.logits_rows], residual[batch.logits_rows]
            update = kernels.linear(attended, layer.attention.output)
            hidden, residual = kernels.add_rms_norm(update, residual, layer.mlp_norm, eps)
            next_norm = self._final_norm if is_last else self._layers[index + 1].input_norm
            hidden, residual = kernels.add_rms_norm(layer.mlp(hidden), residual, next_norm, eps)
        return hidden

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return self._kernels.linear(hidden, self._head).float()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system gives a page when it is first written; torch.zeros would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _load_layer(spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels) -> Layer:
    prefix = f"model.layers.{index}."
    attention = GroupedAttention if spec.latent is None else LatentAttention
    mlp = SparseMlp if spec.experts and index in spec.experts.layers else GatedMlp
    return Layer(
        input_norm=source.get(prefix + "input_layernorm.weight"),
        attention=attention(spec, index, source, kernels),
        mlp_norm=source.get(prefix + "post_attention_layernorm.weight"),
        mlp=mlp(spec, prefix + "mlp.", source, kernels),
    )
