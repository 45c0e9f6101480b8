from typing import Any

import pytest

from jobs.agreement import Agreement, agrees


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
