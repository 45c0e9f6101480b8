"""Label types follow from the constraint alone, and no value is changed to fit its column."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import arrow_types
from jobs.arrow_types import JSON_TEXT, DoesNotFit, completion_column, label_column, result_fields, results_table
from schemas.records import Attempt, Constraint, ConstraintKind, FinishReason, JobSpec, RowResult, RowStatus
from tests.tiny_jobs import MODEL, YES_NO, json_schema

TEXT, INTEGER, NUMBER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}


def fixed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def spec_of(schema: Any, **fields: Any) -> JobSpec:
    constraint = schema if schema is None or isinstance(schema, Constraint) else json_schema(schema)
    return JobSpec(name="t", inputs=(), model=MODEL, constraint=constraint, **fields)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (TEXT, pa.string()),
        (INTEGER, pa.int64()),
        (NUMBER, pa.float64()),
        (BOOLEAN, pa.bool_()),
        ({"enum": ["a", "b"]}, pa.string()),
        ({"enum": ["a", None]}, pa.string()),
        ({"enum": [1, 2]}, pa.int64()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"const": True}, pa.bool_()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": ["integer", "number"]}, pa.float64()),
        ({"anyOf": [INTEGER, {"type": "null"}]}, pa.int64()),
        ({"type": "array", "items": NUMBER}, pa.list_(pa.float64())),
        (fixed(a=TEXT, b={"type": "array", "items": fixed(c=BOOLEAN)}),
         pa.struct({"a": pa.string(), "b": pa.list_(pa.struct({"c": pa.bool_()}))})),
        ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}}, pa.int64()),
        (None, pa.string()),
        (YES_NO, pa.string()),
        (Constraint(kind=ConstraintKind.REGEX, source="[0-9]+"), pa.string()),
    ],
)  # fmt: skip
def test_what_a_constraint_pins_down_is_typed(schema: Any, expected: pa.DataType) -> None:
    assert completion_column(spec_of(schema)).type == expected
    assert label_column(spec_of(schema, num_completions=2)).type == pa.list_(expected)


@pytest.mark.parametrize(
    "schema",
    [
        {},
        fixed(),
        {"type": "object"},
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": True},
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {}},
        {"type": "object", "properties": {"a": TEXT}, "patternProperties": {"^x": TEXT}},
        {"type": ["string", "integer"]},
        {"enum": ["a", 1]},
        {"enum": [True, 1]},
        {"enum": [2**63]},
        {"anyOf": [TEXT, INTEGER]},
        {"type": "array"},
        {"type": "array", "prefixItems": [TEXT, INTEGER]},
        {"$ref": "#/$defs/gone"},
        {"$ref": "#"},
        {"properties": {"a": TEXT}},
        {"type": "null"},
    ],
)
def test_what_it_leaves_open_is_json_text(schema: Any) -> None:
    assert completion_column(spec_of(schema)) == JSON_TEXT


def test_keys_that_a_schema_does_not_mention_stay_in_the_raw_text() -> None:
    column = completion_column(spec_of({"type": "object", "properties": {"a": TEXT}}))
    assert column.fit({"a": "x", "b": 1}) == {"a": "x"}


def test_a_recursive_schema_ends_in_json_text() -> None:
    node = fixed(name=TEXT, children={"type": "array", "items": {"$ref": "#/$defs/node"}})
    column = completion_column(spec_of({"$ref": "#/$defs/node", "$defs": {"node": node}}))
    value = {"name": "a", "children": [{"name": "b", "children": []}]}
    assert pa.array([column.fit(value)], column.type).to_pylist()[0]["children"][0]["name"] == "b"


def test_constraints_from_a_column_give_json_text() -> None:
    for kind in (None, ConstraintKind.JSON_SCHEMA):  # none: a schema, or each row's own kind
        assert completion_column(spec_of(None, constraint_column="c", constraint_column_kind=kind)) == JSON_TEXT
    for kind in (ConstraintKind.REGEX, ConstraintKind.CHOICE):
        assert completion_column(spec_of(None, constraint_column="c", constraint_column_kind=kind)) == arrow_types.TEXT
    assert completion_column(spec_of(None)) == arrow_types.TEXT


@pytest.mark.parametrize(
    ("schema", "value", "reason"),
    [
        (INTEGER, 2**63, "beyond a 64-bit integer"),
        (INTEGER, -(2**63) - 1, "beyond a 64-bit integer"),
        (INTEGER, True, "not an integer"),
        (INTEGER, float("nan"), "not an integer"),
        (NUMBER, float("inf"), "64-bit float"),
        (NUMBER, 10**400, "64-bit float"),
        (NUMBER, 2**53 + 1, "64-bit float"),
        (TEXT, "\ud800", "surrogate"),
        (TEXT, 1, "not a string"),
        (BOOLEAN, 1, "not a boolean"),
        (fixed(a=TEXT), {"a": "x", "b": 1}, "no column for"),
        (fixed(a=TEXT), "x", "no column for"),
        ({"type": "array", "items": INTEGER}, {"a": 1}, "not an array"),
        ({}, float("nan"), "not JSON"),
    ],
)
def test_a_value_that_would_be_changed_is_refused(schema: Any, value: Any, reason: str) -> None:
    with pytest.raises(DoesNotFit, match=reason):
        completion_column(spec_of(schema)).fit(value)


def test_edges_that_fit_are_kept() -> None:
    assert completion_column(spec_of(INTEGER)).fit(2**63 - 1) == 2**63 - 1
    assert completion_column(spec_of(INTEGER)).fit(3.0) == 3
    assert completion_column(spec_of(TEXT)).fit("nul\0 ü") == "nul\0 ü"
    assert completion_column(spec_of({})).fit({"b": "ü", "a": [1, None]}) == '{"b": "ü", "a": [1, null]}'
    assert completion_column(spec_of({})).fit("\ud800") == '"\\ud800"'
    assert completion_column(spec_of(fixed(a=TEXT, b=INTEGER))).fit({"b": None}) == {"b": None}


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    "integer": (INTEGER, st.integers(-(2**63), 2**63 - 1)),
    "text": (TEXT, st.text()),
    "list": ({"type": "array", "items": BOOLEAN}, st.lists(st.booleans())),
    "object": (fixed(a=TEXT, n=NUMBER), st.fixed_dictionaries({"a": st.text(), "n": FLOATS})),
}


@pytest.mark.parametrize("kind", VALUES)
@given(data=st.data())
def test_what_goes_in_comes_out(kind: str, data: st.DataObject) -> None:
    schema, values = VALUES[kind]
    column, drawn = completion_column(spec_of(schema)), data.draw(st.lists(st.none() | values))
    assert pa.array([column.fit(value) for value in drawn], column.type).to_pylist() == drawn


def test_a_first_batch_of_nulls_has_the_same_schema_as_any_other() -> None:
    spec = spec_of(fixed(a=INTEGER))
    attempt = Attempt(
        status=RowStatus.OK, finish_reason=FinishReason.STOP, seed=2**62, max_tokens=4, num_output_tokens=3
    )
    failed = RowResult(row_index=0, status=RowStatus.FAILED, error="half \ud800")
    good = RowResult(row_index=0, status=RowStatus.OK, value={"a": 1}, raw='{"a": 1}', attempts=(attempt,))
    tables = [results_table(spec, 0, rows, "1") for rows in ([], [failed], [good])]
    assert tables[0].schema == tables[1].schema == tables[2].schema
    assert [field.name for field in tables[0].schema][2:] == [field.name for field in result_fields(spec)]
    assert tables[1]["label_error"].to_pylist() == ["half \\ud800"]
    assert tables[2]["label_meta"].to_pylist()[0]["attempt_log"][0]["seed"] == 2**62
