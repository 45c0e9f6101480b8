"""Column types of labels, parts and outputs. A label's type follows from the constraint alone, never from the data.

What a JSON Schema does not pin down is a column of JSON text. Knows no files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.confidence import LABELS_TYPE, confidence, labels_value
from schemas.records import Attempt, ConstraintKind, JobSpec, RowResult

INT64_RANGE = range(-(2**63), 2**63)
MAX_DEPTH = 32
COMBINATORS = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "patternProperties", "dependentSchemas")

ATTEMPT_TYPE = pa.struct(
    {
        "status": pa.string(),
        "finish_reason": pa.string(),
        "seed": pa.int64(),
        "max_tokens": pa.int32(),
        "temperature": pa.float64(),
        "output_tokens": pa.int32(),
    }
)
KEY_TYPE = pa.binary(16)
META_TYPE = pa.struct(
    {
        "finish_reason": pa.string(),
        "attempts": pa.int32(),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "output_tokens": pa.int32(),
        "seconds": pa.float64(),
        "first_token_seconds": pa.float64(),
        "labels": LABELS_TYPE,
        "model_digest": pa.string(),
        "constraint_hash": pa.string(),
        "chunk": pa.int32(),
        "version": pa.string(),
        "attempt_log": pa.list_(ATTEMPT_TYPE),
        "copied_from": pa.string(),
    }
)


class DoesNotFit(ValueError):
    """A valid document cannot be stored in the label's column type without changing it."""


class LabelColumn(NamedTuple):
    """A column type and how a parsed value is put into it; ``fit`` raises DoesNotFit."""

    type: pa.DataType
    fit: Callable[[Any], Any]


def _fit_text(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise DoesNotFit(f"{_short(value)} is not a string")
    if not is_storable(value):
        raise DoesNotFit(f"{_short(value)} holds half of a surrogate pair, which no Parquet string can")
    return value


def _fit_json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise DoesNotFit(f"{_short(value)} is not JSON: {error}") from error
    return text if is_storable(text) else json.dumps(value)


def _fit_integer(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise DoesNotFit(f"{_short(value)} is not an integer")
    if int(value) not in INT64_RANGE:
        raise DoesNotFit(f"{_short(value)} is beyond a 64-bit integer: bound it with minimum and maximum")
    return int(value)


def _fit_number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DoesNotFit(f"{_short(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if number in (float("inf"), float("-inf")) or number != value:
        raise DoesNotFit(f"{_short(value)} is not exact as a 64-bit float")
    return number


def _fit_boolean(value: Any) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise DoesNotFit(f"{_short(value)} is not a boolean")
    return value


AS_WRITTEN = LabelColumn(pa.string(), _fit_text)
"""Of answers to requests: each is kept as the text that was checked, whatever its own request asks for."""
TEXT = LabelColumn(pa.string(), _fit_text)
JSON_TEXT = LabelColumn(pa.string(), _fit_json)
INTEGER = LabelColumn(pa.int64(), _fit_integer)
NUMBER = LabelColumn(pa.float64(), _fit_number)
BOOLEAN = LabelColumn(pa.bool_(), _fit_boolean)
SCALARS = {"string": TEXT, "integer": INTEGER, "number": NUMBER, "boolean": BOOLEAN}


def completion_column(spec: JobSpec) -> LabelColumn:
    """Return the column of one completion's value, typed by the job's constraint."""
    if spec.body_column is not None:
        return AS_WRITTEN
    if spec.constraint is None:
        is_text = spec.constraint_column is None or spec.constraint_column_kind not in (
            None,
            ConstraintKind.JSON_SCHEMA,
        )
        return TEXT if is_text else JSON_TEXT
    if spec.constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return TEXT
    schema = json.loads(spec.constraint.source)
    return _column_of(schema, schema, 0)


def label_column(spec: JobSpec) -> LabelColumn:
    """Return the label's column: one completion's, or a list of them if a row gets several."""
    column = completion_column(spec)
    return column if spec.num_completions == 1 else _list_of(column)


def _column_of(schema: Any, root: Any, depth: int) -> LabelColumn:
    """Map one schema node; anything that two kinds of values can satisfy is JSON text."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return JSON_TEXT
    if "$ref" in schema:
        target = _resolve(schema["$ref"], root)
        return JSON_TEXT if target is None else _column_of(target, root, depth + 1)
    if "const" in schema or "enum" in schema:
        return _column_of_values([schema["const"]] if "const" in schema else schema["enum"])
    if "type" in schema:
        return _column_of_type(schema, root, depth)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := schema.get(keyword), list):
            return _column_of_branches(branches, root, depth)
    return JSON_TEXT


def _column_of_type(schema: dict[str, Any], root: Any, depth: int) -> LabelColumn:
    names = {schema["type"]} if isinstance(schema["type"], str) else set(schema["type"])
    names.discard("null")
    if names == {"integer", "number"}:
        return NUMBER
    if len(names) != 1:
        return JSON_TEXT
    name = names.pop()
    if name == "array" and "items" in schema and "prefixItems" not in schema and isinstance(schema["items"], dict):
        return _list_of(_column_of(schema["items"], root, depth + 1))
    if name == "object":
        return _column_of_object(schema, root, depth)
    return SCALARS.get(name, JSON_TEXT)


def _column_of_object(schema: dict[str, Any], root: Any, depth: int) -> LabelColumn:
    properties = schema.get("properties")
    is_fixed = schema.get("additionalProperties", False) is False and not any(key in schema for key in COMBINATORS)
    if not properties or not is_fixed or not all(is_storable(name) for name in properties):
        return JSON_TEXT
    columns = {name: _column_of(node, root, depth + 1) for name, node in properties.items()}
    return _struct_of(columns, keeps_all="additionalProperties" in schema)


def _column_of_branches(branches: Sequence[Any], root: Any, depth: int) -> LabelColumn:
    others = [node for node in branches if not (isinstance(node, dict) and node.get("type") == "null")]
    columns = {_column_of(node, root, depth + 1) for node in others}
    return columns.pop() if len(columns) == 1 else JSON_TEXT


def _column_of_values(values: Sequence[Any]) -> LabelColumn:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        return INTEGER if all(value is None or value in INT64_RANGE for value in values) else JSON_TEXT
    if kinds and kinds <= {int, float}:
        return NUMBER
    return {frozenset({str}): TEXT, frozenset({bool}): BOOLEAN}.get(frozenset(kinds), JSON_TEXT)


def _resolve(reference: Any, root: Any) -> Any:
    """Follow a ``#/$defs/name`` pointer; None for anything else."""
    if reference == "#":
        return root
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    node = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or key not in node:
            return None
        node = node[key]
    return node


def _list_of(item: LabelColumn) -> LabelColumn:
    def fit(value: Any) -> list[Any] | None:
        if value is not None and not isinstance(value, list):
            raise DoesNotFit(f"{_short(value)} is not an array")
        return None if value is None else [item.fit(each) for each in value]

    return LabelColumn(pa.list_(item.type), fit)


def _struct_of(columns: Mapping[str, LabelColumn], *, keeps_all: bool) -> LabelColumn:
    """Of an object that may have other keys because its schema says nothing, those keys are in the raw text only."""

    def fit(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if not isinstance(value, dict) or (keeps_all and not columns.keys() >= value.keys()):
            extra = sorted(value.keys() - columns.keys()) if isinstance(value, dict) else _short(value)
            raise DoesNotFit(f"no column for {extra}: say additionalProperties: true to get the label as JSON text")
        return {name: column.fit(value[name]) for name, column in columns.items() if name in value}

    return LabelColumn(pa.struct([pa.field(name, column.type) for name, column in columns.items()]), fit)


class OutputNames(NamedTuple):
    """The names of the columns that a job adds, in order."""

    label: str
    raw: str
    status: str
    error: str
    confidence: str
    meta: str


def output_names(output_column: str) -> OutputNames:
    """Return the names of the columns that a job adds."""
    return OutputNames(output_column, *(f"{output_column}_{name}" for name in OutputNames._fields[1:]))


def result_fields(spec: JobSpec) -> list[pa.Field]:
    """Return the columns a job adds to its input, in order."""
    raw_type = pa.string() if spec.num_completions == 1 else pa.list_(pa.string())
    types = (label_column(spec).type, raw_type, pa.string(), pa.string(), pa.float64(), META_TYPE)
    return [pa.field(name, kind) for name, kind in zip(output_names(spec.output_column), types, strict=True)]


def row_column(output_column: str) -> str:
    """Return the name of the part files' row number column."""
    return f"{output_column}_row"


def key_column(output_column: str) -> str:
    """Return the name of the part files' content key column."""
    return f"{output_column}_key"


def part_schema(spec: JobSpec) -> pa.Schema:
    """Return the columns of a part file: the row number in the input file, the content key, ``result_fields``."""
    row = pa.field(row_column(spec.output_column), pa.int64(), nullable=False)
    return pa.schema([row, pa.field(key_column(spec.output_column), KEY_TYPE), *result_fields(spec)])


def results_table(spec: JobSpec, chunk_index: int, rows: Sequence[RowResult], version: str) -> pa.Table:
    """Lay out results as a part file has them."""
    fields = result_fields(spec)
    columns = [
        pa.array([row.value for row in rows], fields[0].type),
        _texts([row.raw for row in rows], fields[1].type),
        pa.array([str(row.status) for row in rows], pa.string()),
        _texts([row.error for row in rows], pa.string()),
        pa.array([confidence(row.labels) for row in rows], pa.float64()),
        _meta_array(spec, chunk_index, rows, version),
    ]
    keys = [None if row.content_key is None else bytes.fromhex(row.content_key) for row in rows]
    numbers = [pa.array([row.row_index for row in rows], pa.int64()), pa.array(keys, KEY_TYPE)]
    return pa.Table.from_arrays([*numbers, *columns], schema=part_schema(spec))


def _meta_array(spec: JobSpec, chunk_index: int, rows: Sequence[RowResult], version: str) -> pa.StructArray:
    constraint_hash = spec.constraint.key if spec.constraint else None
    columns = {
        "finish_reason": [row.finish_reason for row in rows],
        "attempts": [len(row.attempts) for row in rows],
        "prompt_tokens": [row.num_prompt_tokens for row in rows],
        "cached_tokens": [row.num_cached_tokens for row in rows],
        "output_tokens": [row.num_output_tokens for row in rows],
        "seconds": [row.seconds for row in rows],
        "first_token_seconds": [row.first_token_s for row in rows],
        "labels": [labels_value(row.labels) for row in rows],
        "model_digest": [spec.model.digest] * len(rows),
        "constraint_hash": [constraint_hash] * len(rows),
        "chunk": [chunk_index] * len(rows),
        "version": [version] * len(rows),
        "attempt_log": [[_attempt_values(attempt) for attempt in row.attempts] for row in rows],
        "copied_from": [row.copied_from for row in rows],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in META_TYPE]
    return pa.StructArray.from_arrays(arrays, fields=list(META_TYPE))


def with_origin(meta: pa.StructArray, job_id: str) -> pa.StructArray:
    """Return meta values that say from which job they were copied."""
    arrays = [meta.field(field.name) for field in META_TYPE]
    arrays[META_TYPE.get_field_index("copied_from")] = pa.array([job_id] * len(meta), pa.string())
    return pa.StructArray.from_arrays(arrays, fields=list(META_TYPE))


def _attempt_values(attempt: Attempt) -> tuple[Any, ...]:
    """In the order of ATTEMPT_TYPE."""
    return (
        attempt.status,
        attempt.finish_reason,
        attempt.seed,
        attempt.max_tokens,
        attempt.temperature,
        attempt.num_output_tokens,
    )


def _texts(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Build a text column; what UTF-8 cannot hold (lone surrogates) is written as an escape."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array(
            [[_storable(v) for v in value] if isinstance(value, list) else _storable(value) for value in values], kind
        )


def _storable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def is_storable(text: str) -> bool:
    """Say whether UTF-8 can hold the text: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
