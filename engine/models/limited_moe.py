"""The feed-forward part of DeepSeek V4: experts whose activations are limited, picked by score or by the token itself.

On one rank. Shape legend: N rows, E experts, K experts of a row. Knows no attention and no files.
"""

import torch
from torch import Tensor

from engine.models import WeightSource
from engine.models.moe import stack_experts
from engine.models.spec import ModelSpec
from kernels.api import Kernels
from kernels.reference_moe import limit_gates, score, weigh


class LimitedMlp:
    """down(silu(gate x) * up x), with gate x at most ``limit`` and up x within it."""

    def __init__(self, prefix: str, source: WeightSource, kernels: Kernels, limit: float) -> None:
        gate, down, up = (source.get(f"{prefix}w{number}.weight") for number in (1, 2, 3))
        self._kernels, self._limit = kernels, limit
        self._gate_up, self._down = kernels.pack_projection(torch.cat((gate, up))), kernels.pack_projection(down)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Rows [N, hidden] -> [N, hidden]."""
        gate_up = limit_gates(self._kernels.linear(hidden, self._gate_up), self._limit)
        return self._kernels.linear(self._kernels.silu_mul(gate_up), self._down)


class LimitedExperts:
    """One layer's router and experts; the first layers look a token's experts up in a table."""

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels) -> None:
        compressed = spec.compressed
        assert compressed is not None, "limited experts need their sizes"
        prefix, limit = f"layers.{index}.ffn.", compressed.activation_limit
        self._kernels, self._gate = kernels, compressed.gate
        self._router = kernels.pack_router(source.get(f"{prefix}gate.weight", torch.float32))
        self._table = self._bias = None
        if index in compressed.hash_layers:
            self._table = source.get(f"{prefix}gate.tid2eid", torch.int64)
        else:
            self._bias = source.get(f"{prefix}gate.bias", torch.float32)
        experts = [f"{prefix}experts.{expert}." for expert in range(compressed.num_experts)]
        gate_up, down = stack_experts(source, experts, ("w1", "w3")), stack_experts(source, experts, ("w2",))
        self._experts = kernels.pack_experts(gate_up, down, limit)
        self._shared = LimitedMlp(f"{prefix}shared_experts.", source, kernels, limit)

    def __call__(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """Normed rows [N, hidden] of tokens [N] -> [N, hidden]."""
        logits = self._kernels.router_logits(hidden, self._router)
        if self._table is None:
            weights, experts = self._kernels.route(logits, self._gate, self._bias)
        else:
            experts = self._table[input_ids]
            weights = weigh(score(logits, self._gate.scoring), self._gate, experts)
        return self._kernels.experts_mlp(hidden, weights, experts, self._experts).add_(self._shared(hidden))
