"""The small heads that choose a block's tokens one after the other (DSpark, arXiv:2607.05147).

The logits of a whole block come from one pass, in which no place knows its neighbours' tokens. Here each place learns
the token before it, by a bias of low rank. Shape legend: S sequences, r rank. Knows no attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.models import WeightSource
from engine.models.block_spec import BlockSpec, MarkovKind
from engine.models.layers import load_linear
from kernels.api import Kernels


class MarkovHead:
    """Implements the kinds of MarkovKind but NONE."""

    def __init__(self, spec: BlockSpec, source: WeightSource, kernels: Kernels) -> None:
        prefix = "model.markov_head."
        self._kind, self._kernels = spec.markov, kernels
        self._embedding = source.get(f"{prefix}markov_w1.weight")
        self._output = kernels.pack_weight(source.get(f"{prefix}markov_w2.weight"))
        self._inner: Any = None
        if name := {MarkovKind.GATED: "gate_proj", MarkovKind.RNN: "joint_proj"}.get(spec.markov):
            self._inner = kernels.pack_weight(*load_linear(source, prefix + name, has_bias=True))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Tokens int64 [S] -> [S, r]."""
        return functional.embedding(token_ids, self._embedding)

    def start(self, embedded: Tensor) -> Tensor:
        """What is known before a block's first token: [S, r]; only an RNN adds to it."""
        return torch.zeros_like(embedded)

    def __call__(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The bias of the logits, float32 [S, V], at a place behind the ``embedded`` token, and the next state.

        ``hidden`` [S, hidden] is the place's own.
        """
        kernels = self._kernels
        latent = embedded
        if self._kind is MarkovKind.GATED:
            latent = kernels.linear(torch.cat((hidden, embedded), dim=-1), self._inner).sigmoid() * embedded
        elif self._kind is MarkovKind.RNN:
            joint = kernels.linear(torch.cat((state, embedded, hidden), dim=-1), self._inner)
            gate, candidate, latent = joint.chunk(3, dim=-1)
            state = torch.lerp(candidate.tanh(), state, gate.sigmoid())
            latent = latent.tanh()
        return kernels.wide_linear(latent, self._output), state


class ConfidenceHead:
    """Foretells whether the token chosen at a place is accepted if all before it are."""

    def __init__(self, source: WeightSource) -> None:
        self._linear = load_linear(source, "model.confidence_head.proj", has_bias=True)

    def __call__(self, features: Tensor) -> Tensor:
        """``features`` [S, hidden], or [S, hidden + r] with the token before, embedded: float32 [S] in 0 .. 1."""
        weight, bias = self._linear
        assert bias is not None, "it was loaded with one"
        return functional.linear(features.float(), weight.float(), bias.float()).squeeze(-1).sigmoid()
