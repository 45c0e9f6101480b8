"""How much of a draft is verified: as brute force would choose, from what was measured."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.acceptance import PRIOR_CHANCE, Acceptance, StepCosts, choose_lengths
from engine.types import Draft

DRAFT = Draft((7, 7, 7, 7), (1, 2, 4), (None,) * 3, kind="copied")

steps_s = st.lists(st.floats(0.0, 0.3), min_size=10, max_size=10).map(lambda more: 1 + np.cumsum(more))
conditional = st.lists(st.floats(0.05, 0.95), max_size=3)


@given(st.lists(conditional, min_size=1, max_size=3), st.integers(1, 5), steps_s)
def test_the_lengths_are_those_with_the_most_tokens_a_second(
    conditionals: list[list[float]], num_draws: int, seconds: np.ndarray
) -> None:
    chances = [np.cumprod(each).tolist() for each in conditionals]

    def rate(lengths: tuple[int, ...]) -> float:
        expected = num_draws + sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        return float(expected / seconds[sum(lengths)])

    best = max(map(rate, itertools.product(*(range(len(each) + 1) for each in chances))))
    assert rate(tuple(choose_lengths(chances, num_draws, seconds))) == pytest.approx(best)


def test_nothing_is_verified_where_each_row_costs_the_same_and_all_of_it_where_rows_are_free() -> None:
    chances = [[0.9, 0.8], [0.5]]
    assert choose_lengths(chances, 2, np.arange(2, 6)) == [0, 0]
    assert choose_lengths(chances, 2, np.ones(4)) == [2, 1]


def test_chances_are_those_measured_and_fall_along_the_draft() -> None:
    acceptance = Acceptance(3)
    assert acceptance.chances(DRAFT) == pytest.approx([PRIOR_CHANCE**n for n in (1, 2, 3)])
    for accepted in [3, 1] * 200:
        acceptance.note("copied", 3, accepted)
    assert acceptance.chances(DRAFT) == pytest.approx([1.0, 0.5, 0.5], abs=0.02)
    assert acceptance.chances(DRAFT._replace(kind="new")) == pytest.approx([PRIOR_CHANCE**n for n in (1, 2, 3)])


def test_a_kind_that_is_never_right_is_tried_now_and_then() -> None:
    acceptance = Acceptance(3)
    tried = []
    for _ in range(4000):
        tried.append(acceptance.is_promising("wrong"))
        if tried[-1]:
            acceptance.note("wrong", 3, 0)
    assert all(tried[:20])
    assert 0 < sum(tried[2000:]) < 100


def test_costs_lie_between_what_was_measured_and_outliers_do_not_count() -> None:
    costs = StepCosts()
    assert costs.seconds(np.array([1, 5])).tolist() == [1, 5]
    for num_rows, seconds in [(8, 9.0), (8, 2.0), (8, 3.0), (64, 4.0), (16, 1.0)]:
        costs.note(num_rows, seconds)
    measured = costs.seconds(np.array([1, 8, 16, 40, 64, 128]))
    assert measured.tolist() == pytest.approx([2.0, 2.0, 2.0, 3.0, 4.0, 8.0])
