"""Slots of experts: every choice lands on a copy of its expert, and copies share rows by position."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.expert_slots import ExpertSlots, first_placement

CPU = torch.device("cpu")


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 3), st.data())
def test_a_choice_lands_on_a_copy_of_its_expert(
    num_experts: int, num_ranks: int, extra: int, data: st.DataObject
) -> None:
    placement = first_placement(num_experts, num_ranks, extra)
    assert set(placement.ravel().tolist()) == set(range(num_experts))
    slots = ExpertSlots(placement, CPU, can_move=True)
    shuffled = np.array(data.draw(st.permutations(placement.ravel().tolist()))).reshape(placement.shape)
    addresses = {tensor.data_ptr() for tensor in vars(slots).values() if isinstance(tensor, torch.Tensor)}
    for current in (placement, shuffled):
        slots.move(current)
        num_positions = placement.size
        experts = torch.arange(num_experts).expand(num_positions, -1)
        chosen = slots.choose(experts, torch.arange(num_positions))
        assert torch.equal(torch.from_numpy(current.ravel())[chosen], experts)
        for expert in range(num_experts):
            holders = np.flatnonzero(current.ravel() == expert).tolist()
            assert chosen[: len(holders), expert].tolist() == holders, "copies take turns"
    assert addresses == {tensor.data_ptr() for tensor in vars(slots).values() if isinstance(tensor, torch.Tensor)}


def test_experts_that_divide_evenly_are_in_order_and_need_no_table() -> None:
    assert first_placement(8, 2, 0).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    slots = ExpertSlots(first_placement(8, 2, 0), CPU)
    experts = torch.tensor([[3, 1]])
    assert slots.choose(experts, torch.tensor([5])) is experts
    with pytest.raises(AssertionError, match="no tables"):
        slots.move(slots.placement)
