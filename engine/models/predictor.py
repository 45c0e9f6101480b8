"""The layer behind the last one of DeepSeek V3: it predicts the token after the next (arXiv:2412.19437, section 2.2).

Row t is made of the trunk's state of token t and of token t + 1, and has a latent cache of its own at the same slots.
Its embedding and its head are the trunk's. Shape legend: N rows, L logit rows. Knows no requests and no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import Rows, StepBatch
from engine.models import WeightSource
from engine.models.layers import Rotary
from engine.models.spec import ModelSpec
from kernels.api import Kernels

if TYPE_CHECKING:
    from engine.models.decoder import Layer


class Predictor:
    """The layer ``spec.num_layers`` of a checkpoint, on a single rank."""

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        kernels: Kernels,
        *,
        layer: Layer,
        embedding: Tensor,
        rotary: Rotary,
    ) -> None:
        prefix = f"model.layers.{spec.num_layers}."
        self._kernels, self._eps, self._embedding, self._rotary = kernels, spec.rms_norm_eps, embedding, rotary
        self._token_norm, self._state_norm, self._norm = (
            source.get(f"{prefix}{name}.weight") for name in ("enorm", "hnorm", "shared_head.norm")
        )
        self._join = kernels.pack_projection(source.get(f"{prefix}eh_proj.weight"))
        self.layer = layer

    @torch.no_grad()
    def __call__(self, following_ids: Tensor, states: Tensor, batch: StepBatch, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Of the rows ``logits_rows``, what the head takes and what the next row is made of: [L, hidden] each.

        ``following_ids`` int64 [N]: the token after each row's; ``states`` [N, hidden] of the trunk, or of this layer's
        rows one before.
        """
        kernels, layer, rows = self._kernels, self.layer, batch.logits_rows
        embedded = functional.embedding(following_ids, self._embedding)
        parts = ((embedded, self._token_norm), (states, self._state_norm))
        joined = torch.cat([kernels.rms_norm(part, norm, self._eps) for part, norm in parts], dim=-1)
        residual = kernels.linear(joined, self._join)
        hidden = kernels.rms_norm(residual, layer.input_norm, self._eps)
        attended = layer.attention(hidden, self._rotary(batch.positions), batch.attention, cache)
        if not len(rows):
            return attended.new_empty(0, residual.shape[1]), residual[:0]
        update, residual = kernels.linear(attended[rows], layer.attention.output), residual[rows]
        hidden, residual = kernels.add_rms_norm(update, residual, layer.mlp_norm, self._eps)
        update = layer.mlp(hidden, Rows(batch.positions[rows], len(rows)))
        return kernels.add_rms_norm(update, residual, self._norm, self._eps)
