"""Where the experts of a layer are: every rank has some slots, each slot one expert, an expert one slot or several.

The copy that computes a row is chosen by the row's position, so that an answer depends on no other row. The tables on
the device keep their addresses when experts move. Knows no weights.
"""

import math

import numpy as np
import torch
from torch import Tensor

from engine.eplb import Array, place_experts


def count_slots(num_experts: int, num_ranks: int, num_extra_slots: int) -> int:
    """Slots of each rank."""
    return math.ceil(num_experts / num_ranks) + num_extra_slots


def first_placement(num_experts: int, num_ranks: int, num_extra_slots: int) -> Array:
    """Experts by slot before anything was counted: int64 [R, S]; in order if they divide evenly."""
    slots_per_rank = count_slots(num_experts, num_ranks, num_extra_slots)
    if slots_per_rank * num_ranks == num_experts:
        return np.arange(num_experts).reshape(num_ranks, slots_per_rank)
    return place_experts(np.ones((1, num_experts)), num_ranks, slots_per_rank)


class ExpertSlots:
    """One layer's placement, alike on all ranks."""

    def __init__(self, placement: Array, device: torch.device, *, can_move: bool = False) -> None:
        num_experts = self.num_experts = int(placement.max()) + 1
        self.placement = placement
        self._is_trivial = not can_move and np.array_equal(placement.ravel(), np.arange(num_experts))
        max_copies = placement.size - num_experts + 1
        self._num_copies = torch.empty(num_experts, dtype=torch.int64, device=device)
        self._slots = torch.zeros(num_experts, max_copies, dtype=torch.int64, device=device)
        self._write(placement)

    def choose(self, experts: Tensor, positions: Tensor) -> Tensor:
        """The slots that compute ``experts`` int64 [N, K] of rows at ``positions`` int64 [N]: [N, K]."""
        if self._is_trivial:
            return experts
        return self._slots[experts, positions[:, None] % self._num_copies[experts]]

    def move(self, placement: Array) -> None:
        """Use another placement, of the same shape, from the next step on."""
        assert not self._is_trivial, "a recorded step reads no tables"
        assert placement.shape == self.placement.shape, "slots do not come and go"
        self.placement = placement
        self._write(placement)

    def _write(self, placement: Array) -> None:
        experts = placement.ravel()
        num_copies = np.bincount(experts)
        order = np.argsort(experts, kind="stable")  # slots by expert, in order of slots
        copy_of = np.arange(len(order)) - np.repeat(np.cumsum(num_copies) - num_copies, num_copies)
        slots = np.zeros(tuple(self._slots.shape), dtype=np.int64)
        slots[experts[order], copy_of] = order
        self._num_copies.copy_(torch.from_numpy(num_copies))
        self._slots.copy_(torch.from_numpy(slots))
