"""Moving experts: what a slot held is read before it is overwritten, nothing moves without need."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.dist import Group
from engine.eplb import Array
from engine.expert_balance import WINDOW_STEPS, ExpertBalance, carry_out, plan_moves, settle
from engine.expert_slots import ExpertSlots, first_placement


@st.composite
def two_placements(draw: st.DrawFn) -> tuple[Array, Array]:
    """Two placements of the same experts into the same slots."""
    num_ranks, slots, num_experts = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(1, 8))
    num_experts = min(num_experts, num_ranks * slots)
    extra = st.lists(st.integers(0, num_experts - 1), min_size=(n := num_ranks * slots - num_experts), max_size=n)
    placements = [draw(st.permutations([*range(num_experts), *draw(extra)])) for _ in range(2)]
    first, second = (np.array(placement, dtype=np.int64).reshape(num_ranks, slots) for placement in placements)
    return first, second


@given(two_placements())
def test_experts_that_stay_on_their_rank_stay_in_their_slots(placements: tuple[Array, Array]) -> None:
    current, wanted = placements
    settled = settle(current, wanted)
    for old, new, asked in zip(current, settled, wanted, strict=True):
        assert sorted(new.tolist()) == sorted(asked.tolist())
        num_kept = sum(min((old == e).sum(), (asked == e).sum()) for e in set(old.tolist()))
        assert (old == new).sum() == num_kept


@given(two_placements())
def test_moves_fill_each_slot_from_one_that_had_its_expert(placements: tuple[Array, Array]) -> None:
    current, wanted = placements
    moves, slots = plan_moves(current, wanted), current.ravel().copy()
    slots[[move.target for move in moves]] = current.ravel()[[move.source for move in moves]]
    assert (slots == wanted.ravel()).all()
    assert len(moves) == (current != wanted).sum()
    for source, target in moves:
        rank = target // current.shape[1]
        assert source // current.shape[1] == rank or slots[target] not in current[rank]


@given(st.permutations(range(6)))
def test_weights_of_one_rank_change_places_without_being_lost(order: list[int]) -> None:
    current, wanted = np.arange(6)[None], np.array(order)[None]
    weights = [torch.arange(6.0)[:, None].repeat(1, 3), torch.arange(6.0)]
    addresses = [tensor.data_ptr() for tensor in weights]
    carry_out(plan_moves(current, wanted), weights, 6, Group())
    assert weights[0][:, 1].tolist() == weights[1].tolist() == order
    assert [tensor.data_ptr() for tensor in weights] == addresses


def test_counts_are_of_one_step_and_the_last_steps_decide() -> None:
    balance = ExpertBalance(Group(), interval=WINDOW_STEPS * 2)
    slots = ExpertSlots(first_placement(4, 2, 0), torch.device("cpu"), can_move=True)
    counts = balance.watch(slots, [torch.arange(2.0)])
    counts += 100  # a warm-up's
    balance.start()
    for step in range(2 * WINDOW_STEPS):
        counts += torch.tensor([6, 6, 1, 1] if step < WINDOW_STEPS else [5, 1, 5, 1])
        balance.end_step()
        assert counts.sum() == 0
    assert balance.mean == 1.0, "old steps say that the first rank is busy, the last ones that both are"
    assert balance.num_moves == 0
    assert slots.placement.tolist() == [[0, 1], [2, 3]]
