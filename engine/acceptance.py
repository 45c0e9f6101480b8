"""What drafts are worth: how often they are accepted and what rows of a step cost, both as measured.

From these follows how much of its drafts a step verifies. Pure arithmetic.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq

import numpy as np

from engine.types import Draft

PRIOR_CHANCE, PRIOR_WEIGHT = 0.6, 4.0
"""What is assumed of drafts of a kind that was not tried yet, and how many tries that counts for."""
DECAY = 0.9995
"""Of what is known, at each proposal: what was given up is tried again after some thousands of them."""
MIN_CHANCE = 0.05
"""Drafts below cannot pay: a step of one row more costs more than that."""
MAX_KINDS = 4096
SAMPLES_KEPT = 9
BUCKETS_PER_DOUBLING = 2


class Acceptance:
    """How often drafts of each kind are accepted, by position in the draft."""

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self._counts: dict[Hashable, np.ndarray] = {}  # [2, positions]: tried with all before accepted; accepted

    def note(self, kind: Hashable, num_verified: int, num_accepted: int) -> None:
        """Count a draft of which the first ``num_accepted`` of ``num_verified`` tokens were drawn."""
        counts = self._of(kind)
        counts[0, : min(num_verified, num_accepted + 1)] += 1
        counts[1, :num_accepted] += 1

    def is_promising(self, kind: Hashable) -> bool:
        """Whether the first token of a draft of this kind may be worth its row; asking counts as a proposal."""
        counts = self._of(kind)
        counts *= DECAY
        return bool(self._chances(counts)[0] >= MIN_CHANCE)

    def chances(self, draft: Draft) -> list[float]:
        """For each of a draft's tokens, that it and all before it are accepted, as its source or experience says."""
        if draft.chances:
            return list(draft.chances)
        return np.cumprod(self._chances(self._of(draft.kind))[: len(draft.stops)]).tolist()  # type: ignore[no-any-return]

    def _of(self, kind: Hashable) -> np.ndarray:
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            self._counts.clear()
        return self._counts.setdefault(kind, np.zeros((2, self._num_positions)))

    @staticmethod
    def _chances(counts: np.ndarray) -> np.ndarray:
        chances: np.ndarray = (counts[1] + PRIOR_CHANCE * PRIOR_WEIGHT) / (counts[0] + PRIOR_WEIGHT)
        return chances


class StepCosts:
    """Seconds that a step takes by its number of rows: the least of the last ones of about so many rows."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, int]]] = {}  # seconds and rows, by bucket

    def note(self, num_rows: int, seconds: float) -> None:
        """Count a step."""
        bucket = round(BUCKETS_PER_DOUBLING * np.log2(max(1, num_rows)))
        self._samples.setdefault(bucket, deque(maxlen=SAMPLES_KEPT)).append((seconds, num_rows))

    def seconds(self, num_rows: np.ndarray) -> np.ndarray:
        """Of steps of so many rows, between what was measured; beyond, or if nothing was, each row costs the same."""
        if not self._samples:
            return num_rows.astype(float)
        least = [min(samples) for _, samples in sorted(self._samples.items())]
        seconds = np.maximum.accumulate([s for s, _ in least])
        rows = np.array([n for _, n in least])
        inside = np.interp(num_rows, rows, seconds)
        return inside * np.maximum(1.0, num_rows / rows[-1])  # type: ignore[no-any-return]


def choose_lengths(chances: Seq[Seq[float]], num_draws: int, seconds: Seq[float] | np.ndarray) -> list[int]:
    """How much of each draft a step verifies, so that it yields the most tokens a second.

    ``chances`` of each draft, descending as in ``Acceptance.chances``; ``num_draws``: tokens that the step yields
    anyway; ``seconds[n]``: what it takes with n tokens of drafts. DeepInfer's name: confidence-scheduled verification.
    """
    places = ((chance, -place, index) for index, each in enumerate(chances) for place, chance in enumerate(each))
    ranked = sorted(places, reverse=True)
    expected = np.array([num_draws, *(chance for chance, _, _ in ranked)]).cumsum()
    best = int(np.argmax(expected / np.asarray(seconds)[: len(expected)]))
    lengths = [0] * len(chances)
    for _, _, index in itertools.islice(ranked, best):
        lengths[index] += 1
    return lengths
