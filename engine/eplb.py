"""Which expert is copied and which rank holds it, from how often each was picked: the policy, a pure function.

Copies and places are chosen to lower the sum over steps of the busiest rank's load, which is what a step waits for; the
rule is DeepInfer's (deepinfer/model_executor/eplb/policy.py), then swaps. Knows no weights and no ranks' memory.

Shape legend: T steps, E experts, R ranks, S expert slots of a rank.
"""

from itertools import combinations
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

MAX_SWEEPS = 8  # over all pairs of ranks; the first ones bring most, later ones up to 13 were seen to bring a little


def place_experts(counts: Array, num_ranks: int, slots_per_rank: int) -> Array:
    """Decide for one layer which expert each slot holds: int64 [R, S], every expert at least once.

    ``counts`` [T, E] says how many rows picked each expert in each step.
    """
    num_experts, num_slots = counts.shape[1], num_ranks * slots_per_rank
    assert num_experts <= num_slots, "topology is checked when the engine starts"
    num_copies = count_copies(counts, num_slots)
    return swap_copies(counts, place_copies(counts, num_copies, num_ranks))


def count_copies(counts: Array, num_slots: int) -> Array:
    """Hand ``num_slots`` copies out, one of each expert and then one by one where it lowers the peaks most: [E].

    Copies share an expert's rows evenly; the peak of a step is the largest share of any expert. On equal gain, the
    expert with the largest shares gets the copy, then the first one.
    """
    num_copies = np.ones(counts.shape[1], dtype=np.int64)
    for _ in range(num_slots - counts.shape[1]):
        gains, shares = peak_gains(counts, num_copies), (counts / num_copies).sum(axis=0)
        num_copies[np.lexsort((-shares, -gains))[0]] += 1
    return num_copies


def peak_gains(counts: Array, num_copies: Array) -> Array:
    """By how much one more copy of each expert would lower the sum over steps of the largest share: [E]."""
    shares = counts / num_copies
    busiest = shares.argmax(axis=1)
    steps = np.arange(len(counts))
    peaks = shares[steps, busiest]
    shares[steps, busiest] = -np.inf
    runners_up = shares.max(axis=1, initial=0)
    lowered = np.maximum(runners_up, counts[steps, busiest] / (num_copies[busiest] + 1))
    return np.bincount(busiest, weights=peaks - lowered, minlength=counts.shape[1])


def place_copies(counts: Array, num_copies: Array, num_ranks: int) -> Array:
    """Give each copy to the rank with room where the sum over steps of the busiest rank's load stays lowest: [R, S].

    Copies with the largest total load go first; on equal loads the first rank gets the copy.
    """
    slots_per_rank = int(num_copies.sum()) // num_ranks
    shares = counts / num_copies
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = np.zeros((num_ranks, len(counts)))
    copies = np.repeat(np.arange(counts.shape[1]), num_copies)
    for expert in copies[np.argsort(-shares.sum(axis=0)[copies], kind="stable")].tolist():
        open_ranks = [rank for rank in range(num_ranks) if len(held[rank]) < slots_per_rank]
        rank = min(open_ranks, key=lambda rank: _peak_with(loads, rank, shares[:, expert]))
        held[rank].append(expert)
        loads[rank] += shares[:, expert]
    return np.array(held, dtype=np.int64)


def swap_copies(counts: Array, placement: Array) -> Array:
    """Swap two copies of two ranks wherever that lowers the sum over steps of the busiest rank's load: [R, S]."""
    placement = placement.copy()
    shares = (counts / np.bincount(placement.ravel(), minlength=counts.shape[1])).T
    for _ in range(MAX_SWEEPS):
        swaps = [_swap_best(shares, placement, one, other) for one, other in combinations(range(len(placement)), 2)]
        if not any(swaps):
            break
    return placement


def _swap_best(shares: Array, placement: Array, one: int, other: int) -> bool:
    """Carry out the best swap between two ranks, in place, if it lowers the peaks; ``shares`` is [E, T]."""
    loads = shares[placement].sum(axis=1)
    rest = np.delete(loads, (one, other), axis=0).max(axis=0, initial=0)
    moved = shares[placement[other]][None] - shares[placement[one]][:, None]  # [S, S, T]: what a swap brings to ``one``
    peaks = np.maximum(np.maximum(loads[one] + moved, loads[other] - moved), rest).sum(axis=2)
    slot, other_slot = np.unravel_index(peaks.argmin(), peaks.shape)
    if peaks[slot, other_slot] >= loads.max(axis=0).sum() * (1 - 1e-9):
        return False
    placement[one, slot], placement[other, other_slot] = placement[other, other_slot], placement[one, slot]
    return True


def _peak_with(loads: Array, rank: int, share: Array) -> float:
    changed = loads.copy()
    changed[rank] += share
    return float(changed.max(axis=0).sum())


def balance(counts: Array, placement: Array) -> float:
    """Mean load of a rank over the mean of the busiest one's, in (0, 1]; 1: no rank ever waits for another."""
    num_copies = np.bincount(placement.ravel(), minlength=counts.shape[1])
    loads = (counts / num_copies)[:, placement].sum(axis=2)
    total = float(loads.max(axis=1).sum())
    return float(loads.mean(axis=1).sum()) / total if total else 1.0
