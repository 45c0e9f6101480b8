"""The feed-forward part of DeepSeek V4: experts whose activations are clamped, picked by score or by the token itself.

Plain torch, an expert at a time, on one rank. Shape legend: N rows, E experts, K experts of a row, I inner size.
"""

import torch
from torch import Tensor
from torch.nn import functional

from engine.models import WeightSource
from engine.models.spec import ModelSpec
from kernels.api import Kernels
from kernels.reference_moe import score, weigh


class LimitedMlp:
    """down(silu(gate x) * up x), with gate x at most ``limit`` and up x within it."""

    def __init__(self, prefix: str, source: WeightSource, kernels: Kernels, limit: float) -> None:
        gate, down, up = (source.get(f"{prefix}w{number}.weight") for number in (1, 2, 3))
        self._kernels, self._limit = kernels, limit
        self._gate_up, self._down = kernels.pack_projection(torch.cat((gate, up))), kernels.pack_projection(down)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Rows [N, hidden] -> [N, hidden]."""
        gate, up = self._kernels.linear(hidden, self._gate_up).chunk(2, dim=-1)
        inner = functional.silu(gate.clamp(max=self._limit)) * up.clamp(-self._limit, self._limit)
        return self._kernels.linear(inner, self._down)


class LimitedExperts:
    """One layer's router and experts; the first layers look a token's experts up in a table."""

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels) -> None:
        compressed = spec.compressed
        assert compressed is not None, "limited experts need their sizes"
        prefix = f"layers.{index}.ffn."
        self._kernels, self._gate = kernels, compressed.gate
        self._router = kernels.pack_router(source.get(f"{prefix}gate.weight", torch.float32))
        self._table = self._bias = None
        if index in compressed.hash_layers:
            self._table = source.get(f"{prefix}gate.tid2eid", torch.int64)
        else:
            self._bias = source.get(f"{prefix}gate.bias", torch.float32)
        self._experts = [
            LimitedMlp(f"{prefix}experts.{expert}.", source, kernels, compressed.activation_limit)
            for expert in range(compressed.num_experts)
        ]
        self._shared = LimitedMlp(f"{prefix}shared_experts.", source, kernels, compressed.activation_limit)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """Normed rows [N, hidden] of tokens [N] -> [N, hidden]."""
        logits = self._kernels.router_logits(hidden, self._router)
        if self._table is None:
            weights, experts = self._kernels.route(logits, self._gate, self._bias)
        else:
            experts = self._table[input_ids]
            weights = weigh(score(logits, self._gate.scoring), self._gate, experts)
        out = self._shared(hidden).float()
        for expert in experts.unique().tolist():
            rows, slots = (experts == expert).nonzero(as_tuple=True)
            out.index_add_(0, rows, self._experts[expert](hidden[rows]).float() * weights[rows, slots, None])
        return out.to(hidden.dtype)
