"""Distributions over labels at another temperature."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.confidence import confidence, general_path, scale
from schemas.records import Label

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=2, max_size=6)


@given(WEIGHTS, st.floats(0.1, 10))
def test_scaling_is_the_softmax_of_divided_logits(weights: list[float], temperature: float) -> None:
    total = sum(weights)
    logits = [math.log(weight / total) / temperature for weight in weights]
    normaliser = sum(math.exp(logit) for logit in logits)
    expected = [math.exp(logit) / normaliser for logit in logits]
    assert scale([weight / total for weight in weights], temperature) == pytest.approx(expected)


def test_an_impossible_label_stays_impossible() -> None:
    assert scale([1.0, 0.0], 0.05) == [1.0, 0.0]


def test_the_confidence_of_an_output_is_that_of_all_its_labels_together() -> None:
    labels = [Label(path="/a", text="x", probability=0.5), Label(path="/b", text="y", probability=0.4)]
    assert confidence(labels) == pytest.approx(0.2)
    assert confidence([]) is None


def test_items_of_an_array_share_a_path() -> None:
    assert general_path("/tags/12/a1/3") == "/tags/*/a1/*"
