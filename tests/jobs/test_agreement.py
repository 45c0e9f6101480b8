from pathlib import Path
from typing import Any

import pytest

from jobs.agreement import Agreement, agrees, measure_agreement
from tests.tiny_jobs import make_job, run_job, write_input


@pytest.mark.parametrize(
    ("label", "gold", "expected"),
    [
        ("a", "a", True),
        ("a", "b", False),
        (3, "3", True),
        (3.0, 3, True),
        (True, "true", True),
        (True, True, True),
        (False, True, False),
        ({"route": "bug"}, "bug", True),
        ({"why": "x", "kind": "bug"}, "bug", True),
        ({"why": "bug", "kind": "x"}, "bug", False),
        ({"a": 1, "b": 2}, '{"a": 1, "b": 2}', True),
        ({"a": 1, "b": 2}, {"a": 1, "b": 2}, True),
        ({"a": 1, "b": 2}, "1", False),
        (["x", "y", "y"], "y", True),
        ([{"kind": "x"}, {"kind": "y"}, {"kind": "y"}], "y", True),
        ([None, "y"], "y", True),
        (["x", "y"], ["x", "y"], True),
        ("{broken", "{broken", True),
    ],
)
def test_a_label_agrees_with_gold(label: Any, gold: Any, expected: bool) -> None:
    assert agrees(label, gold, "kind") is expected


def test_nothing_compared_has_no_share() -> None:
    assert Agreement(0, 0).share is None
    assert Agreement(1, 4).share == 0.25


def agreement_with(tmp_path: Path, gold: list[Any]) -> Agreement | None:
    location = write_input(tmp_path / "in.parquet", {"text": ["x"] * len(gold), "gold": gold})
    return measure_agreement(run_job(make_job(tmp_path, [location], gold_column="gold", prompt_column="text")))


def test_the_best_constant_answer_is_told(tmp_path: Path) -> None:
    assert agreement_with(tmp_path, ["no", "yes", "no", None, "no"]) == Agreement(1, 4, "no", 3)


@pytest.mark.parametrize("gold", [["yes"] * 4, ["a", "b", "c"]], ids=["one class", "free text"])
def test_a_constant_answer_is_no_rival_where_gold_is_no_few_classes(tmp_path: Path, gold: list[str]) -> None:
    agreement = agreement_with(tmp_path, gold)
    assert agreement is not None
    assert agreement.commonest is None
