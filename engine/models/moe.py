"""The sparse feed-forward part of Qwen3-MoE and DeepSeek: a router, its experts, and an expert that sees every row.

Shape legend: N rows, E experts, I inner size of an expert. Knows no attention and no files.
"""

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from engine.batch import Rows
from engine.dist import Ranks
from engine.expert_balance import ExpertBalance
from engine.expert_slots import ExpertSlots, first_placement
from engine.models import WeightSource
from engine.models.dense import GatedMlp
from engine.models.spec import ModelSpec
from kernels.api import Kernels


class SparseMlp:
    """Implements decoder.FeedForward. Routing is in fp32 whatever the model's dtype."""

    def __init__(
        self,
        spec: ModelSpec,
        prefix: str,
        source: WeightSource,
        kernels: Kernels,
        *,
        ranks: Ranks | None = None,
        balance: ExpertBalance | None = None,
    ) -> None:
        experts, ranks = spec.experts, ranks or Ranks()
        assert experts is not None, "a sparse layer needs experts"
        self._kernels = kernels
        self._gate = experts.gate
        router = source.get(prefix + "gate.weight", torch.float32)
        self._router = kernels.pack_router(router)
        self._router_bias = (
            source.get(prefix + "gate.e_score_correction_bias", torch.float32) if experts.has_gate_bias else None
        )
        placement = first_placement(experts.num_experts, ranks.experts.size, ranks.topology.expert_copies)
        self._slots = ExpertSlots(placement, router.device, can_move=balance is not None)
        self._exchange = ranks.exchange
        held = placement[ranks.experts.index].tolist()
        for expert in set(range(experts.num_experts)) - set(held):
            source.leave(f"{prefix}experts.{expert}.")
        mine = [f"{prefix}experts.{expert}." for expert in held]
        gate_up = stack_experts(source, mine, ("gate_proj", "up_proj"))
        self._experts = kernels.pack_experts(gate_up, stack_experts(source, mine, ("down_proj",)))
        self._counts = balance.watch(self._slots, slot_tensors(self._experts)) if balance else None
        self._shared = GatedMlp(spec, prefix + "shared_experts.", source, kernels) if experts.shared_size else None

    def __call__(self, hidden: Tensor, rows: Rows) -> Tensor:
        """See FeedForward.__call__."""
        kernels = self._kernels
        logits = kernels.router_logits(hidden, self._router)
        weights, experts = kernels.route(logits, self._gate, self._router_bias)
        if self._counts is not None and rows.counted is not None:
            self._counts.index_add_(0, experts.flatten(), rows.counted.repeat_interleave(experts.shape[1]))
        slots = self._slots.choose(experts, rows.positions)
        sent = self._exchange.dispatch(hidden, weights, slots, max_rows=rows.max_rows)
        out = self._exchange.combine(kernels.experts_mlp(sent.x, sent.weights, sent.experts, self._experts), sent)
        return out if self._shared is None else out.add_(self._shared(hidden, rows))


def slot_tensors(packed: Any) -> list[Tensor]:
    """All tensors of packed experts, whichever way they are packed: each has a row for each slot."""
    if isinstance(packed, Tensor):
        return [packed]
    parts = [getattr(packed, field.name) for field in fields(packed)] if is_dataclass(packed) else []
    return [tensor for part in parts for tensor in slot_tensors(part)]


def stack_experts(source: WeightSource, experts: Sequence[str], projections: Sequence[str]) -> Tensor:
    """One tensor [E, rows, in] of each expert's projections one below the other, filled expert by expert."""
    stacked: Tensor | None = None
    for index, prefix in enumerate(experts):
        parts = [source.get(f"{prefix}{name}.weight") for name in projections]
        if stacked is None:
            stacked = parts[0].new_empty(len(experts), sum(len(part) for part in parts), parts[0].shape[1])
        torch.cat(parts, out=stacked[index])
    assert stacked is not None, "there is at least one expert"
    return stacked
