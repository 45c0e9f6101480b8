"""Counts which experts rows pick and moves experts between ranks, a layer at a time, so that no rank waits for another.

``engine.eplb`` decides where experts go; here they go there: between steps, into tensors that keep their addresses, on
all ranks after the same step. Knows no requests and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.dist import Group
from engine.eplb import Array, balance, place_experts
from engine.expert_slots import ExpertSlots

log = structlog.get_logger()

WINDOW_STEPS = 64
"""Steps that a placement is made for: the last ones."""

MIN_GAIN = 1.02
"""By how much a placement must improve the balance before anything is moved."""


class Move(NamedTuple):
    """An expert's weights go from one slot to another; slots are numbered over all ranks."""

    source: int
    target: int


@dataclass(frozen=True)
class Watched:
    """One layer: where its experts are, this rank's tensors [S, ...] that hold them, and what its rows picked."""

    slots: ExpertSlots
    first: Array  # the placement that it began with
    tensors: Sequence[Tensor]
    counts: Tensor  # int32 [E], of this rank's rows in this step


class ExpertBalance:
    """Of all sparse layers on one rank; all ranks that share experts call ``end_step`` after each step."""

    def __init__(self, ranks: Group, interval: int) -> None:
        """A layer is placed anew every ``interval`` steps."""
        self._ranks, self._interval = ranks, interval
        self._layers: list[Watched] = []
        self._balances: list[float] = []
        self._unmoved: list[float] = []
        self._counts = self._window = torch.empty(0)
        self._num_steps = 0
        self.num_moves = 0

    def watch(self, slots: ExpertSlots, tensors: Sequence[Tensor]) -> Tensor:
        """Add a layer; returns the tensor int32 [E] that it adds its picks to."""
        counts = torch.zeros(slots.num_experts, dtype=torch.int32, device=tensors[0].device)
        self._layers.append(Watched(slots, slots.placement, tensors, counts))
        self._balances.append(1.0)
        self._unmoved.append(1.0)
        return counts

    def start(self) -> None:
        """Forget what warm-ups have counted; ``end_step`` may be called from now on."""
        self._window = torch.stack([layer.counts for layer in self._layers]).zero_().repeat(WINDOW_STEPS, 1, 1)
        for layer in self._layers:
            layer.counts.zero_()

    @property
    def mean(self) -> float:
        """Mean load of a rank over the busiest one's, of the layers as they were last placed, in (0, 1]."""
        return float(np.mean(self._balances))

    @property
    def mean_unmoved(self) -> float:
        """What ``mean`` would be if no expert had moved."""
        return float(np.mean(self._unmoved))

    def end_step(self) -> None:
        """Keep the step's counts; every ``interval`` steps, place the experts of the next layer."""
        counts = [layer.counts for layer in self._layers]
        torch.stack(counts, out=self._window[self._num_steps % WINDOW_STEPS])
        torch._foreach_zero_(counts)
        self._num_steps += 1
        turn, is_between = divmod(self._num_steps, self._interval)
        if not is_between:
            self._place(turn % len(self._layers))

    def _place(self, index: int) -> None:
        layer = self._layers[index]
        window = self._window[: self._num_steps, index].contiguous()
        counts = self._ranks.add(window).cpu().numpy()
        current = layer.slots.placement
        wanted = settle(current, place_experts(counts, *current.shape))
        before, after = balance(counts, current), balance(counts, wanted)
        self._balances[index], self._unmoved[index] = max(before, after), balance(counts, layer.first)
        if after < before * MIN_GAIN:
            return
        moves = plan_moves(current, wanted)
        carry_out(moves, layer.tensors, current.shape[1], self._ranks)
        layer.slots.move(wanted)
        self.num_moves += len(moves)
        log.info("experts_moved", layer=index, num_moves=len(moves), before=round(before, 3), after=round(after, 3))


def settle(current: Array, wanted: Array) -> Array:
    """Order each rank's slots so that the experts that it has already stay where they are: int64 [R, S]."""
    settled = np.full_like(wanted, -1)
    for row, old, new in zip(settled, current, wanted, strict=True):
        coming = new.tolist()
        for slot, expert in enumerate(old.tolist()):
            if expert in coming:
                coming.remove(expert)
                row[slot] = expert
        row[row < 0] = coming
    return settled


def plan_moves(current: Array, wanted: Array) -> list[Move]:
    """What each slot that changes is filled from: the same rank if it can be, else the first slot with the expert."""
    slots_per_rank, old, new = current.shape[1], current.ravel(), wanted.ravel()
    moves = []
    for target in np.flatnonzero(old != new).tolist():
        sources = np.flatnonzero(old == new[target]).tolist()
        near = [source for source in sources if source // slots_per_rank == target // slots_per_rank]
        moves.append(Move((near or sources)[0], target))
    return moves


def carry_out(moves: Sequence[Move], tensors: Sequence[Tensor], slots_per_rank: int, ranks: Group) -> None:
    """Move experts between slots, in place; all that leaves is read before anything is overwritten."""
    mine = range(ranks.index * slots_per_rank, (ranks.index + 1) * slots_per_rank)
    arriving: list[tuple[Tensor, Tensor]] = []
    sent: list[tuple[Tensor, int]] = []
    received: list[tuple[Tensor, int]] = []
    for source, target in moves:
        for tensor in tensors:
            if target in mine:
                slot = tensor[target - mine.start]
                if source in mine:
                    arriving.append((tensor[source - mine.start].clone(), slot))
                else:
                    arriving.append((torch.empty_like(slot), slot))
                    received.append((arriving[-1][0], source // slots_per_rank))
            elif source in mine:
                sent.append((tensor[source - mine.start], target // slots_per_rank))
    ranks.swap(sent, received)
    for value, slot in arriving:
        slot.copy_(value)
