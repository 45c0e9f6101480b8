"""Which labels could have stood where a finished text has one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.choices import find_choices
from schemas.records import Constraint, ConstraintKind


def fixed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def found(schema: Any, document: Any) -> dict[str, tuple[str, ...]]:
    """Names of the labels by path; each choice's own label is where it says."""
    text = json.dumps(document, ensure_ascii=False)
    choices = find_choices(Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema)), text)
    assert all(text[choice.start : choice.end] == choice.labels[choice.index] for choice in choices)
    return {choice.path: choice.names for choice in choices}


AB, YN = {"enum": ["a", "b"]}, {"enum": ["y", "n"]}
UNION = {
    "oneOf": [
        fixed(k={"const": "a"}, v=AB),
        fixed(k={"const": "b"}, v={"type": "string"}),
        fixed(k={"const": "c"}, v=YN),
    ]
}
TREE = {"$ref": "#/$defs/t", "$defs": {"t": fixed(l=AB, c={"type": "array", "items": {"$ref": "#/$defs/t"}})}}


@pytest.mark.parametrize(
    ("schema", "document", "expected"),
    [
        (AB, "a", {"": ("a", "b")}),
        (fixed(r={"enum": ['q"', "ü/~"]}), {"r": "ü/~"}, {"/r": ('q"', "ü/~")}),
        (fixed(**{"a/b~": {"type": "boolean"}}), {"a/b~": False}, {"/a~1b~0": ("true", "false")}),
        (fixed(n={"enum": [1, 12, None, True, "1"]}), {"n": 12}, {"/n": ("1", "12", "null", "true", '"1"')}),
        (fixed(g={"type": "integer", "minimum": -1, "maximum": 1}), {"g": 0}, {"/g": ("-1", "0", "1")}),
        (fixed(x={"anyOf": [AB, {"type": "null"}, {"const": "c"}]}), {"x": None}, {"/x": ("a", "b", "c", "null")}),
        ({"type": "array", "items": YN}, ["n", "y"], {"/0": ("y", "n"), "/1": ("y", "n")}),
        ({"type": "array", "prefixItems": [YN], "items": AB}, ["n", "b"], {"/0": ("y", "n"), "/1": ("a", "b")}),
        ({"type": "object", "additionalProperties": YN}, {"any": "y"}, {"/any": ("y", "n")}),
        (UNION, {"k": "a", "v": "a"}, {"/k": ("a", "b", "c"), "/v": ("a", "b")}),
        (UNION, {"k": "b", "v": "a"}, {"/k": ("a", "b", "c")}),
        (UNION, {"k": "c", "v": "y"}, {"/k": ("a", "b", "c"), "/v": ("y", "n")}),
        (TREE, {"l": "a", "c": [{"l": "b", "c": []}]}, {"/l": ("a", "b"), "/c/0/l": ("a", "b")}),
    ],
)  # fmt: skip
def test_a_closed_set_is_found_where_its_label_stands(schema: Any, document: Any, expected: dict[str, Any]) -> None:
    assert {path: set(names) for path, names in found(schema, document).items()} == {
        path: set(names) for path, names in expected.items()
    }


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        ({"const": "a"}, "a"),
        ({"type": "string"}, "a"),
        ({"type": "integer", "minimum": 0}, 3),
        ({"type": "integer", "minimum": 0, "maximum": 1000}, 3),
        (fixed(x={"anyOf": [AB, {"type": "string"}]}), {"x": "a"}),
        ({"enum": list(range(2000))}, 7),
        ({"enum": [[1], [2]]}, [1]),
        ({}, {"a": True}),
    ],
)
def test_what_is_open_or_leaves_no_choice_is_not_a_choice(schema: Any, document: Any) -> None:
    assert found(schema, document) == {}


def test_a_choice_constraint_is_one_choice_and_its_labels_are_no_json() -> None:
    labels = ['"quoted"', "a", "ab"]
    constraint = Constraint(kind=ConstraintKind.CHOICE, source=json.dumps(labels))
    (choice,) = find_choices(constraint, '"quoted"')
    assert (choice.path, choice.names, choice.index) == ("", tuple(labels), 0)
    assert find_choices(constraint, "other") == ()
    assert find_choices(Constraint(kind=ConstraintKind.CHOICE, source='["only"]'), "only") == ()


@pytest.mark.parametrize("text", ["", "{", '{"r": ', '{"r": "a', "[" * 100_000, '{"r": "a"'])
def test_a_text_that_is_cut_has_no_choices(text: str) -> None:
    constraint = Constraint(
        kind=ConstraintKind.JSON_SCHEMA, source=json.dumps({"type": "array", "items": {"$ref": "#"}})
    )
    assert find_choices(constraint, text) == ()


LEAVES = st.sampled_from([(AB, "a"), (YN, "n"), ({"type": "boolean"}, True), ({"type": "string"}, 'x"},[')])
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.text(max_size=3), inner, min_size=1, max_size=3).map(
            lambda members: (fixed(**{k: s for k, (s, _) in members.items()}), {k: d for k, (_, d) in members.items()})
        )
        | st.lists(inner, min_size=1, max_size=3).map(
            lambda items: (
                {"type": "array", "prefixItems": [s for s, _ in items], "items": False},
                [d for _, d in items],
            )
        )
    ),
    max_leaves=6,
)


@given(NESTED)
def test_every_path_leads_to_its_label(case: tuple[Any, Any]) -> None:
    schema, document = case
    for path, names in found(schema, document).items():
        value = document
        for part in path.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            value = value[int(key)] if isinstance(value, list) else value[key]
        assert (value if isinstance(value, str) else json.dumps(value)) in names


def test_a_whole_number_given_as_a_float_is_a_label_as_it_is_written() -> None:
    source = json.dumps({"enum": [0.5, 1.0, 1.5]})
    (choice,) = find_choices(Constraint(kind=ConstraintKind.JSON_SCHEMA, source=source), "1")
    assert (choice.names, choice.index) == (("0.5", "1", "1.5"), 1)
