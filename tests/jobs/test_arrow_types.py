"""Label types follow from the constraint alone, and no value is changed to fit its column."""

import io
import json
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import arrow_types
from jobs.arrow_types import JSON_TEXT, DoesNotFit, completion_column, label_column, result_fields, results_table
from schemas.records import Attempt, Constraint, ConstraintKind, FinishReason, JobSpec, RowResult, RowStatus
from tests.tiny_jobs import MODEL, YES_NO, json_schema

DAY, MOMENT = {"type": "string", "format": "date"}, {"type": "string", "format": "date-time"}
ENUM = pa.dictionary(pa.int32(), pa.string())
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
        ({"enum": ["a", "b"]}, ENUM),
        ({"enum": ["a", None]}, ENUM),
        ({"const": "a"}, ENUM),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, ENUM),
        ({"anyOf": [{"enum": ["a"]}, TEXT]}, pa.string()),
        (fixed(a={"enum": ["x"]}, b={"type": "array", "items": {"enum": ["x"]}}),
         pa.struct({"a": pa.string(), "b": pa.list_(pa.string())})),
        ({"enum": [1, 2]}, pa.int64()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"const": True}, pa.bool_()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63 - 1}, pa.int64()),
        ({"type": "integer", "minimum": 0, "maximum": 2**64}, pa.decimal128(38, 0)),
        ({"type": "integer", "minimum": 2**63}, pa.string()),
        ({"type": "integer", "minimum": 0, "maximum": 10**38}, pa.string()),
        ({"enum": [2**63, None]}, pa.decimal128(38, 0)),
        ({"type": "string", "format": "date"}, pa.date32()),
        ({"type": ["null", "string"], "format": "date-time"}, pa.timestamp("us", "UTC")),
        ({"type": "string", "format": "time"}, pa.string()),
        ({"type": "string", "format": "uuid"}, pa.string()),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "string", "format": "date"}, pa.date32()),
        ({"type": ["integer", "number"]}, pa.float64()),
        ({"anyOf": [INTEGER, {"type": "null"}]}, pa.int64()),
        ({"type": "array", "items": NUMBER}, pa.list_(pa.float64())),
        (fixed(a=TEXT, b={"type": "array", "items": fixed(c=BOOLEAN)}),
         pa.struct({"a": pa.string(), "b": pa.list_(pa.struct({"c": pa.bool_()}))})),
        ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}}, pa.int64()),
        (None, pa.string()),
        (YES_NO, ENUM),
        (Constraint(kind=ConstraintKind.REGEX, source="[0-9]+"), pa.string()),
    ],
)  # fmt: skip
def test_what_a_constraint_pins_down_is_typed(schema: Any, expected: pa.DataType) -> None:
    assert completion_column(spec_of(schema)).type == expected
    assert label_column(spec_of(schema, num_completions=2)).type == pa.list_(
        pa.string() if expected == ENUM else expected
    )


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
        {"enum": [10**38]},
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
        ({"enum": [2**63]}, 10**38, "38 digits"),
        (TEXT, "\ud800", "surrogate"),
        (DAY, "2024-02-30", "not a date"),
        (DAY, "20240229", "not a date"),
        (MOMENT, "2024-06-30T23:59:60Z", "leap second"),
        (MOMENT, "0001-01-01T00:00:00+01:00", "year 1"),
        (MOMENT, "2024-06-30T23:59:59.1234567Z", "microsecond"),
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
OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
MOMENTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=OFFSETS)
BIG = {"type": "integer", "minimum": -(10**37), "maximum": 10**37}
ANYTHING = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v, max_size=3))


LEAVES = st.sampled_from(
    [
        (TEXT, st.text()),
        (INTEGER, st.integers(-(2**63), 2**63 - 1)),
        (BIG, st.integers(-(10**37), 10**37)),
        (NUMBER, FLOATS),
        (BOOLEAN, st.booleans()),
        ({"enum": ["a", "ü", None]}, st.sampled_from(["a", "ü", None])),
        ({"enum": [1, 2.5]}, st.sampled_from([1, 2.5])),
        (DAY, st.dates().map(date.isoformat)),
        (MOMENT, MOMENTS.map(datetime.isoformat)),
        ({"type": ["integer", "null"]}, st.none() | st.integers(-9, 9)),
        ({"anyOf": [DAY, {"type": "null"}]}, st.none() | st.dates().map(date.isoformat)),
        ({"title": "open"}, ANYTHING),
        ({"title": "open", "type": "array", "prefixItems": [TEXT]}, st.lists(st.text(), max_size=2)),
    ]
)
Case = tuple[dict[str, Any], st.SearchStrategy[Any]]


def _list_case(inner: Case) -> Case:
    return {"type": "array", "items": inner[0]}, st.lists(inner[1], max_size=3)


def _object_case(members: dict[str, Case]) -> Case:
    schema = fixed(**{name: schema for name, (schema, _) in members.items()})
    return schema, st.fixed_dictionaries({}, optional={name: values for name, (_, values) in members.items()})


CASES = st.recursive(
    LEAVES,
    lambda inner: inner.map(_list_case) | st.dictionaries(st.text(min_size=1), inner, min_size=1).map(_object_case),
    max_leaves=5,
)


def as_json(value: Any, schema: Any) -> Any:
    """A stored value as the JSON it came from; a missing key is null, and a moment is one in UTC."""
    if "anyOf" in schema:
        schema = schema["anyOf"][0]
    if schema.get("title") == "open":
        return None if value is None else json.loads(value)
    if value is None:
        return None
    if schema.get("type") == "object":
        return {name: as_json(value[name], each) for name, each in schema["properties"].items()}
    if schema.get("type") == "array":
        return [as_json(each, schema["items"]) for each in value]
    return int(value) if schema is BIG else value.isoformat() if schema is DAY else value


def normalised(value: Any, schema: Any) -> Any:
    """What a document says, as ``as_json`` tells it."""
    if value is None or schema.get("title") == "open":
        return value
    if schema.get("type") == "object":
        return {name: normalised(value.get(name), each) for name, each in schema["properties"].items()}
    if schema.get("type") == "array":
        return [normalised(each, schema["items"]) for each in value]
    return datetime.fromisoformat(value).astimezone(UTC) if schema is MOMENT else value


@settings(max_examples=200)
@given(case=CASES, data=st.data())
def test_a_typed_label_says_what_its_raw_text_says(case: Case, data: st.DataObject) -> None:
    """Through the record that a worker keeps, and through Parquet."""
    schema, values = case
    spec = spec_of(schema)
    documents = data.draw(st.lists(values, max_size=4))
    texts = [json.dumps(document) for document in documents]
    column = completion_column(spec)
    rows = [
        RowResult(row_index=index, status=RowStatus.OK, value=column.fit(json.loads(text)), raw=text)
        for index, text in enumerate(texts)
    ]
    kept = [msgspec.msgpack.decode(msgspec.msgpack.encode(row), type=RowResult) for row in rows]
    sink = io.BytesIO()
    pq.write_table(results_table(spec, 0, kept, "1"), sink)
    sink.seek(0)
    table = pq.read_table(sink)
    assert table["label_raw"].to_pylist() == texts
    stored = [as_json(value, schema) for value in table["label"].to_pylist()]
    assert stored == [normalised(document, schema) for document in documents]


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
