"""A drafter that guesses a block of tokens in one pass over its target's states (DSpark, arXiv:2607.05147).

Its layers' keys and values of tokens that the target has computed are made of the target's inner states, and lie in
caches of their own at the same slots; a block's own ones are overwritten by those. Embedding and head are the target's.
Shape legend: N rows of a target's step, S sequences, B tokens of a block, V vocabulary. Knows no requests and no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Rows, StepBatch
from engine.models import WeightSource
from engine.models.block_spec import BlockSpec, MarkovKind
from engine.models.layers import Rotary, load_linear, pack_fused
from engine.models.markov import ConfidenceHead, MarkovHead
from kernels.api import HeadNorms, Kernels

if TYPE_CHECKING:
    from engine.models.decoder import Layer


class ContextKeys(NamedTuple):
    """What makes a layer's keys and values of a target's states: the projections that the layer has for its rows."""

    packed: Any
    norms: HeadNorms


class BlockDrafter:
    """On a single rank, beside the decoder that is its target."""

    def __init__(
        self, spec: BlockSpec, source: WeightSource, kernels: Kernels, *, layers: list[Layer], embedding: Tensor
    ) -> None:
        self.spec, self.layers = spec, layers
        self._kernels, self._eps, self._embedding = kernels, spec.layers.rms_norm_eps, embedding
        self._rotary = Rotary(spec.layers.rope, spec.layers.head_dim, embedding.device, embedding.dtype)
        self._join = kernels.pack_projection(source.get("model.fc.weight"))
        self._context_norm, self._norm = (source.get(f"model.{name}.weight") for name in ("hidden_norm", "norm"))
        self._contexts = [self._load_context(source, index) for index in range(spec.layers.num_layers)]
        self._markov = None if spec.markov is MarkovKind.NONE else MarkovHead(spec, source, kernels)
        self._confidence = ConfidenceHead(source) if spec.has_confidence else None

    def _load_context(self, source: WeightSource, index: int) -> ContextKeys:
        prefix = f"model.layers.{index}.self_attn."
        sides = [load_linear(source, f"{prefix}{n}_proj", has_bias=self.spec.layers.qkv_bias) for n in "kv"]
        weight = source.get(f"{prefix}k_norm.weight")
        return ContextKeys(pack_fused(self._kernels, sides), HeadNorms(weight, weight, self._eps))

    def read(self, states: list[Tensor], batch: StepBatch, caches: list[Tensor]) -> None:
        """Write the keys and values of a target's rows: ``states`` [N, hidden] of each of ``target_layer_ids``."""
        kernels, cos_sin = self._kernels, self._rotary(batch.positions)
        context = kernels.rms_norm(kernels.linear(torch.cat(states, dim=-1), self._join), self._context_norm, self._eps)
        for keys, cache in zip(self._contexts, caches, strict=True):
            k, v = (
                side.unflatten(-1, (-1, self.spec.layers.head_dim))
                for side in kernels.linear(context, keys.packed).chunk(2, dim=-1)
            )
            nobodys_q, slots = k.clone(), batch.attention.slots
            kernels.rotary_write_kv(nobodys_q, k, v, cos_sin, cache=cache, slots=slots, norms=keys.norms)

    @torch.no_grad()
    def __call__(self, batch: StepBatch, caches: list[Tensor]) -> Tensor:
        """Final-normed states [S * B, hidden] of blocks, in which each row sees all rows: their batch says so."""
        kernels, eps = self._kernels, self._eps
        cos_sin, rows = self._rotary(batch.positions), Rows(batch.positions, len(batch.positions))
        residual = functional.embedding(batch.input_ids, self._embedding)
        hidden = kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self._norm]
        for layer, cache, next_norm in zip(self.layers, caches, next_norms, strict=True):
            attended = layer.attention(hidden, cos_sin, batch.attention, cache)
            update = kernels.linear(attended, layer.attention.output)
            hidden, residual = kernels.add_rms_norm(update, residual, layer.mlp_norm, eps)
            hidden, residual = kernels.add_rms_norm(layer.mlp(hidden, rows), residual, next_norm, eps)
        return hidden

    @torch.no_grad()
    def choose(self, hidden: Tensor, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The likeliest tokens of each block, int64 [S, B], and how likely each is accepted, float32 [S, B].

        ``hidden`` [S, B, hidden] and ``logits`` float32 [S, B, V] are the blocks', ``token_ids`` int64 [S] their first
        tokens, which are known. A place's token depends on the one before; there may be no confidences.
        """
        chosen: list[Tensor] = []
        confidences: list[Tensor] = []
        state: Tensor | None = None
        for place in range(self.spec.block_size):
            features, scores = hidden[:, place], logits[:, place]
            if self._markov:
                embedded = self._markov.embed(token_ids)
                bias, state = self._markov(embedded, features, self._markov.start(embedded) if state is None else state)
                scores = scores + bias
                if self.spec.confidence_reads_token:
                    features = torch.cat((features, embedded), dim=-1)
            token_ids = scores.argmax(dim=-1)
            chosen.append(token_ids)
            if self._confidence:
                confidences.append(self._confidence(features))
        return torch.stack(chosen, dim=1), torch.stack(confidences, dim=1) if confidences else None
