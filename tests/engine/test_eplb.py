"""The policy that copies and places experts, against trying everything."""

from itertools import product
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.eplb import balance, count_copies, peak_gains, place_copies, place_experts, swap_copies

Array = np.ndarray[Any, np.dtype[Any]]


def counts_of(max_steps: int = 4, max_experts: int = 5) -> st.SearchStrategy[Array]:
    """Small windows of counts, with zeros and ties."""
    sizes = st.tuples(st.integers(1, max_steps), st.integers(1, max_experts))
    return sizes.flatmap(
        lambda size: st.lists(
            st.lists(st.integers(0, 12), min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]
        ).map(np.array)
    )


def sum_of_peaks(counts: Array, num_copies: Array) -> float:
    return float((counts / num_copies).max(axis=1).sum())


@given(counts_of(), st.data())
def test_a_gain_is_how_much_the_peaks_fall_when_the_copy_is_there(counts: Array, data: st.DataObject) -> None:
    num_copies = np.array([data.draw(st.integers(1, 3)) for _ in range(counts.shape[1])])
    for expert, gain in enumerate(peak_gains(counts, num_copies)):
        more = num_copies + (np.arange(len(num_copies)) == expert)
        assert np.isclose(gain, sum_of_peaks(counts, num_copies) - sum_of_peaks(counts, more))


@given(counts_of(max_steps=1), st.integers(0, 4))
def test_in_one_step_no_other_number_of_copies_has_a_lower_peak(counts: Array, num_extra: int) -> None:
    num_slots = counts.shape[1] + num_extra
    chosen = count_copies(counts, num_slots)
    assert chosen.sum() == num_slots
    options = [c for c in product(range(1, num_extra + 2), repeat=counts.shape[1]) if sum(c) == num_slots]
    best = min(sum_of_peaks(counts, np.array(option)) for option in options)
    assert np.isclose(sum_of_peaks(counts, chosen), best)


@given(counts_of(), st.integers(0, 3))
def test_each_extra_copy_goes_where_trying_all_says(counts: Array, num_extra: int) -> None:
    before = count_copies(counts, counts.shape[1] + num_extra)
    after = count_copies(counts, counts.shape[1] + num_extra + 1)
    options = [before + (np.arange(len(before)) == expert) for expert in range(len(before))]
    assert any((after == option).all() for option in options), "copies are handed out one by one"
    assert np.isclose(sum_of_peaks(counts, after), min(sum_of_peaks(counts, option) for option in options))


@settings(deadline=None)
@given(counts_of(max_experts=6), st.integers(1, 3), st.integers(1, 3))
def test_every_expert_has_a_slot_and_the_busiest_rank_is_told_right(counts: Array, num_ranks: int, slots: int) -> None:
    if num_ranks * slots < counts.shape[1]:
        counts = counts[:, : num_ranks * slots]
    placement = place_experts(counts, num_ranks, slots)
    assert placement.shape == (num_ranks, slots)
    assert set(placement.ravel().tolist()) == set(range(counts.shape[1]))
    loads = np.zeros((len(counts), num_ranks))
    for rank, slot in product(range(num_ranks), range(slots)):
        expert = placement[rank, slot]
        loads[:, rank] += counts[:, expert] / (placement == expert).sum()
    told = balance(counts, placement)
    assert np.isclose(told * loads.max(axis=1).sum(), loads.mean(axis=1).sum())


def best_placement(counts: Array, num_ranks: int, slots: int) -> float:
    """The lowest sum of peaks of any assignment of single experts to ranks."""
    peaks = []
    for ranks in product(range(num_ranks), repeat=counts.shape[1]):
        if all(ranks.count(rank) == slots for rank in range(num_ranks)):
            loads = np.stack([counts[:, np.array(ranks) == rank].sum(axis=1) for rank in range(num_ranks)])
            peaks.append(float(loads.max(axis=0).sum()))
    return min(peaks)


@settings(deadline=None)
@given(counts_of(max_experts=4).filter(lambda counts: counts.shape[1] == 4))
def test_two_ranks_of_two_slots_are_placed_as_well_as_can_be(counts: Array) -> None:
    loads = counts[:, place_experts(counts, 2, 2)].sum(axis=2)
    assert np.isclose(loads.max(axis=1).sum(), best_placement(counts, 2, 2))


@settings(deadline=None)
@given(counts_of(max_experts=6), st.integers(1, 3), st.integers(0, 2))
def test_swaps_never_make_the_busiest_rank_busier(counts: Array, num_ranks: int, num_extra: int) -> None:
    num_slots = -(-(counts.shape[1] + num_extra) // num_ranks) * num_ranks
    placed = place_copies(counts, count_copies(counts, num_slots), num_ranks)
    swapped = swap_copies(counts, placed)
    assert sorted(swapped.ravel()) == sorted(placed.ravel())
    assert balance(counts, swapped) >= balance(counts, placed) - 1e-9


def test_skewed_experts_become_balanced() -> None:
    generator = np.random.default_rng(0)
    popularity = 1 / np.arange(1, 65)
    counts = generator.multinomial(6 * 256, popularity / popularity.sum(), size=50)
    contiguous = np.arange(64).reshape(8, 8)
    assert balance(counts, contiguous) < 0.25
    assert balance(counts, place_experts(counts, 8, 10)) > 0.9
