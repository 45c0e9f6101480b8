"""The decoder of DeepSeek V4: layers joined by hyper-connections, over caches that compressed attention fills.

One rank, plain torch where kernels has no operation of it yet. Shape legend: N rows, L logit rows, S streams.
"""

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import StepBatch
from engine.expert_balance import ExpertBalance
from engine.models import WeightSource
from engine.models.block_drafter import BlockDrafter
from engine.models.compressed import CompressedAttention, lay_out
from engine.models.decoder import zeroed
from engine.models.hyper import HyperConnection, HyperHead
from engine.models.layers import inverse_frequencies
from engine.models.limited_moe import LimitedExperts
from engine.models.predictor import Predictor
from engine.models.spec import ModelSpec
from kernels.api import BLOCK_SIZE, Kernels


class HyperLayer:
    """One layer: attention and experts, each between a norm and its hyper-connection."""

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels) -> None:
        assert spec.compressed is not None, "hyper-connections need their sizes"
        prefix, hyper, eps = f"layers.{index}.", spec.compressed.hyper, spec.rms_norm_eps
        self.is_compressed = spec.compressed.layer_rates[index] > 0
        self.attention = CompressedAttention(spec, index, source, kernels)
        self.experts = LimitedExperts(spec, index, source, kernels)
        self.around_attention = HyperConnection(hyper, eps, source, kernels, f"{prefix}hc_attn")
        self.around_experts = HyperConnection(hyper, eps, source, kernels, f"{prefix}hc_ffn")
        self.attention_norm, self.experts_norm = (source.get(f"{prefix}{name}_norm.weight") for name in ("attn", "ffn"))


class HyperDecoder:
    """Implements engine.models.Model."""

    is_recordable = shares_prefixes = False
    block_size, max_mixed_rows = BLOCK_SIZE, 0
    expert_balance: ExpertBalance | None = None
    predictor: Predictor | None = None
    block_drafter: BlockDrafter | None = None

    def __init__(self, spec: ModelSpec, source: WeightSource, kernels: Kernels) -> None:
        assert spec.compressed is not None, "this decoder runs compressed attention"
        self.spec, self._kernels = spec, kernels
        self._embedding = source.get("embed.weight")
        self._layers = [HyperLayer(spec, index, source, kernels) for index in range(spec.num_layers)]
        self._hyper_head = HyperHead(spec.compressed.hyper, spec.rms_norm_eps, source)
        self._final_norm = source.get("norm.weight")
        self._head = kernels.pack_weight(source.get("head.weight"))
        size, device = spec.compressed.rope_size, self._embedding.device
        self._plain_frequencies = inverse_frequencies(spec.rope, size).to(device)
        self._compressed_frequencies = inverse_frequencies(spec.compressed.rope, size).to(device)

    def alloc_cache(self, num_blocks: int, block_size: int) -> list[Tensor]:
        """See Model.alloc_cache."""
        embedding = self._embedding
        return [zeroed(shape, embedding.dtype, embedding.device) for shape in self._shapes(num_blocks, block_size)]

    def cache_bytes_per_block(self, block_size: int) -> int:
        """See Model.cache_bytes_per_block."""
        return sum(map(prod, self._shapes(1, block_size))) * self._embedding.dtype.itemsize

    def _shapes(self, num_blocks: int, block_size: int) -> list[tuple[int, ...]]:
        return [(num_blocks, block_size, layer.attention.cache_width) for layer in self._layers]

    @torch.no_grad()
    def forward(self, batch: StepBatch, cache: list[Tensor]) -> Tensor:
        """See Model.forward."""
        assert self.spec.compressed is not None
        kernels, eps = self._kernels, self.spec.rms_norm_eps
        rates = set(self.spec.compressed.layer_rates) - {0}
        layout = lay_out(batch.attention, cache[0].shape[1], rates)
        embedded = functional.embedding(batch.input_ids, self._embedding)
        streams = embedded[:, None].repeat(1, self.spec.compressed.hyper.num_streams, 1)
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            frequencies = self._compressed_frequencies if layer.is_compressed else self._plain_frequencies
            hidden, mix = layer.around_attention.enter(streams)
            normed = kernels.rms_norm(hidden, layer.attention_norm, eps)
            update = layer.attention(normed, frequencies, batch.attention, layout, layer_cache.flatten(0, 1))
            streams = layer.around_attention.leave(streams, update, mix)
            hidden, mix = layer.around_experts.enter(streams)
            update = layer.experts(kernels.rms_norm(hidden, layer.experts_norm, eps), batch.input_ids)
            streams = layer.around_experts.leave(streams, update, mix)
        return kernels.rms_norm(self._hyper_head(streams[batch.logits_rows]), self._final_norm, eps)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model.logits."""
        return self._kernels.wide_linear(hidden, self._head)
