"""The decoder that all families share: embedding, layers of attention and feed-forward, final norm, head.

The spec decides which attention and which feed-forward a layer has; neither knows the other.
Shape legend: N rows, L logit rows. Knows no requests and no files.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Rows, StepBatch
from engine.dist import Ranks
from engine.expert_balance import ExpertBalance
from engine.models import WeightSource
from engine.models.block_drafter import BlockDrafter
from engine.models.block_spec import EMBEDDING_OUTPUT, BlockSpec
from engine.models.deepseek import LatentAttention
from engine.models.dense import GatedMlp, GroupedAttention
from engine.models.layers import Rotary
from engine.models.moe import SparseMlp
from engine.models.predictor import Predictor
from engine.models.spec import ModelSpec
from engine.shards import HEAD, ShardedWeights, head_part, shard_spec
from kernels.api import BLOCK_SIZE, AttentionBatch, Kernels

MIXED_ROWS = 4096
"""Larger steps keep the device busy longer than their launches take."""
MIXED_ROWS_OF_LATENTS = 1024
"""With more rows, expanding latents of long chunks, which no recorded step can plan, saves more than launches cost.

DeepSeek-V2-Lite on an H200: 4,096 rows, 310 tokens each behind 580 shared ones, take 44 ms; all absorbed, 60 ms.
"""


class Attention(Protocol):
    """One layer's attention with its weights; ``output`` is its packed output projection."""

    output: Any

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of the layer's cache tensor; a block takes the same bytes at any ``num_blocks``."""

    def __call__(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], batch: AttentionBatch, cache: Tensor) -> Tensor:
        """Write normed rows ``hidden`` [N, hidden] to the cache and attend: [N, width], before ``output``."""


class FeedForward(Protocol):
    """One layer's feed-forward part with its weights."""

    def __call__(self, hidden: Tensor, rows: Rows, /) -> Tensor:
        """Normed rows [N, hidden] -> [N, hidden]."""


@dataclass(frozen=True)
class Layer:
    """One layer's parts."""

    input_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: FeedForward


class Decoder:
    """Implements engine.models.Model, on one of the ranks that hold it together."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        kernels: Kernels,
        ranks: Ranks | None = None,
        *,
        has_predictor: bool = False,
    ) -> None:
        """``has_predictor``: load the layer behind the last one too; only on a single rank."""
        ranks = ranks or Ranks()
        self.spec = spec
        self._tensor, self._context = ranks.tensor, ranks.context
        self._kernels = kernels
        if ranks.tensor.size > 1:
            source = ShardedWeights(source, spec, ranks.tensor)
        self._embedding = source.get("model.embed_tokens.weight")
        self._device, self._dtype = self._embedding.device, self._embedding.dtype
        shard, interval = shard_spec(spec, ranks.tensor.size), ranks.topology.rebalance_interval
        self.expert_balance = ExpertBalance(ranks.experts, interval) if interval else None
        self._layers = [
            _load_layer(shard, index, source, kernels, ranks=ranks, balance=self.expert_balance)
            for index in range(spec.num_layers)
        ]
        self._final_norm = source.get("model.norm.weight")
        head = self._embedding[head_part(spec.vocab_size, ranks.tensor)] if spec.tie_embeddings else source.get(HEAD)
        self._head_is_divided = len(head) < spec.vocab_size
        self._head = kernels.pack_weight(head)
        operations = {"latent_attention" if spec.latent else "attention"} | ({"experts_mlp"} if spec.experts else set())
        self.is_recordable = kernels.unrecordable.isdisjoint(operations)
        self.block_size = kernels.latent_block_size(shard.num_heads) if spec.latent else BLOCK_SIZE
        can_mix = kernels.decode_only.isdisjoint(operations) and ranks.context.size == 1
        self.shares_prefixes = kernels.prefix_sharing.issuperset(operations - {"experts_mlp"})
        most_rows = MIXED_ROWS_OF_LATENTS if spec.latent else MIXED_ROWS
        self.max_mixed_rows = most_rows if self.is_recordable and can_mix else 0
        self._rotary = Rotary(spec.rope, spec.head_dim, self._device, self._dtype)
        self.block_drafter: BlockDrafter | None = None
        self.predictor = self._load_predictor(source) if has_predictor else None
        if self.predictor:
            self.is_recordable, self.max_mixed_rows = False, 0  # a graph has states of the rows with logits alone

    def _load_predictor(self, source: WeightSource) -> Predictor:
        """See Predictor; its feed-forward part is a sparse one where the trunk has such."""
        spec, index = self.spec, self.spec.num_layers
        if spec.experts:
            spec = replace(spec, experts=replace(spec.experts, layers=spec.experts.layers | {index}))
        layer = _load_layer(spec, index, source, self._kernels, ranks=Ranks(), balance=None)
        rotary, embedding = self._rotary, self._embedding
        return Predictor(spec, source, self._kernels, layer=layer, embedding=embedding, rotary=rotary)

    def add_block_drafter(self, spec: BlockSpec, source: WeightSource) -> None:
        """Load a drafter for this model, before its caches are allocated; only on a single rank."""
        layers = [
            _load_layer(spec.layers, index, source, self._kernels, ranks=Ranks(), balance=None)
            for index in range(spec.layers.num_layers)
        ]
        self.block_drafter = BlockDrafter(spec, source, self._kernels, layers=layers, embedding=self._embedding)

    def alloc_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """See Model.alloc_cache."""
        shapes = [layer.attention.cache_shape(num_blocks, block_size) for layer in self._cached_layers]
        return [zeroed(shape, self._dtype, self._device) for shape in shapes]

    def cache_bytes_per_block(self, block_size: int) -> int:
        """See Model.cache_bytes_per_block."""
        num_values = sum(prod(layer.attention.cache_shape(1, block_size)) for layer in self._cached_layers)
        return num_values * self._dtype.itemsize

    @property
    def _cached_layers(self) -> list[Layer]:
        drafting = [self.predictor.layer] if self.predictor else []
        return self._layers + drafting + (self.block_drafter.layers if self.block_drafter else [])

    @torch.no_grad()
    def forward(self, batch: StepBatch, cache: list[Tensor]) -> Tensor:
        """See Model.forward; rows whose states nobody reads leave the last layer after its attention."""
        kernels, eps = self._kernels, self.spec.rms_norm_eps
        cos_sin = self._rotary(batch.positions)
        rows = Rows(batch.positions, batch.size.rows, self._count_rows(batch))
        residual = functional.embedding(batch.input_ids, self._embedding)
        drafter = self.block_drafter
        read_ids = drafter.spec.target_layer_ids if drafter else ()
        read = [residual.clone()] if EMBEDDING_OUTPUT in read_ids else []
        hidden = kernels.rms_norm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = layer.attention(hidden, cos_sin, batch.attention, cache[index])
            is_last = index + 1 == len(self._layers)
            if is_last and self.predictor is None:
                attended, residual = attended[batch.logits_rows], residual[batch.logits_rows]
                rows = _rows_with_logits(rows, batch)
            update = self._tensor.add(kernels.linear(attended, layer.attention.output))
            hidden, residual = kernels.add_rms_norm(update, residual, layer.mlp_norm, eps)
            next_norm = self._final_norm if is_last else self._layers[index + 1].input_norm
            update = self._tensor.add(layer.mlp(hidden, rows))
            hidden, residual = kernels.add_rms_norm(update, residual, next_norm, eps)
            if index in read_ids:
                read.append(residual.clone())  # the next layer may overwrite it
        if drafter:
            drafter.read(read, batch, cache[-len(drafter.layers) :])
        return hidden

    def _count_rows(self, batch: StepBatch) -> Tensor | None:
        """Which rows' picks of experts count: padding, of which nobody owns the slot, is not a row."""
        if self.expert_balance is None:
            return None
        slots = batch.attention.slots
        mine = slots if len(slots) == len(batch.positions) else slots.view(self._context.size, -1)[self._context.index]
        return (mine > 0).int()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        logits = self._kernels.wide_linear(hidden, self._head)
        if self._head_is_divided:
            logits = torch.cat(self._tensor.stack(logits).unbind(), dim=-1)
        return logits


def _rows_with_logits(rows: Rows, batch: StepBatch) -> Rows:
    """Those that go through the last layer; a recorded step fills up with row 0, which counts once."""
    indices, counted = batch.logits_rows, rows.counted
    if counted is not None:
        counted = counted[indices] * (indices >= torch.arange(len(indices), device=indices.device))
    return Rows(rows.positions[indices], batch.size.logits_rows, counted)


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeroed memory. On a CPU the system gives a page when it is first written; torch.zeros would write them all."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def _load_layer(
    spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels, *, ranks: Ranks, balance: ExpertBalance | None
) -> Layer:
    prefix = f"model.layers.{index}."
    attention = GroupedAttention if spec.latent is None else LatentAttention
    mlp: FeedForward
    if spec.experts and index in spec.experts.layers:
        mlp = SparseMlp(spec, prefix + "mlp.", source, kernels, ranks=ranks, balance=balance)
    else:
        mlp = GatedMlp(spec, prefix + "mlp.", source, kernels)
    return Layer(
        input_norm=source.get(prefix + "input_layernorm.weight"),
        attention=attention(spec, index, source, kernels, ranks.context),
        mlp_norm=source.get(prefix + "post_attention_layernorm.weight"),
        mlp=mlp,
    )
