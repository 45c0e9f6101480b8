"""Key order: known keys come first and in the schema's order, whatever union describes them."""

import json

import pytest

from ops.bench.canonical import KeyOrder
from schemas.constraints import grammar_source, load_constraint
from schemas.records import ConstraintKind


@pytest.mark.parametrize(
    ("schema", "document", "expected"),
    [
        ({"properties": {"b": {}, "a": {}}}, {"c": 1, "a": 2, "b": 3}, ["b", "a", "c"]),
        (
            {"anyOf": [{"properties": {"t": {"const": 1}, "a": {}}, "required": ["t"]}, {"required": ["z", "a"]}]},
            {"a": 1, "z": 2, "t": 2},
            ["z", "a", "t"],
        ),
    ],
)
def test_keys_stand_in_the_order_of_the_schema(
    schema: dict[str, object], document: dict[str, int], expected: list[str]
) -> None:
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": "object", **schema}))
    ordered = KeyOrder(grammar_source(constraint)).apply(document)
    assert list(ordered) == expected
    assert ordered == document
