"""Column types of labels, parts and outputs. A label's type follows from the constraint alone, never from the data.

What a JSON Schema does not pin down is a column of JSON text. Knows no files.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.confidence import confidence
from jobs.meta import META_TYPE, meta_array
from schemas.json_drafts import draft_of
from schemas.records import ConstraintKind, JobSpec, RowResult

INT64_RANGE = range(-(2**63), 2**63)
DECIMAL_RANGE = range(-(10**38) + 1, 10**38)
SECONDS = re.compile(r":\d\d(?:\.(\d+))?(?=[Zz+-])")  # of an RFC 3339 timestamp, with their fraction
MAX_DEPTH = 32
COMBINATORS = ("anyOf", "oneOf", "allOf", "not", "if", "$ref", "$dynamicRef", "patternProperties", "dependentSchemas")

KEY_TYPE = pa.binary(16)


class DoesNotFit(ValueError):
    """A valid document cannot be stored in the label's column type without changing it."""


class LabelColumn(NamedTuple):
    """A column type and how a parsed value is put into it: ``fit`` returns it as JSON has it, or raises DoesNotFit."""

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
    number = _whole(value)
    if number is not None and number not in INT64_RANGE:
        raise DoesNotFit(f"{_short(value)} is beyond a 64-bit integer: bound it with minimum and maximum")
    return number


def _fit_decimal(value: Any) -> str | None:
    """As text: what rows are kept in meanwhile has no larger integers."""
    number = _whole(value)
    if number is not None and number not in DECIMAL_RANGE:
        raise DoesNotFit(f"{_short(value)} has more than 38 digits")
    return None if number is None else str(number)


def _whole(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise DoesNotFit(f"{_short(value)} is not an integer")
    return int(value)


def _fit_date(value: Any) -> str | None:
    text = _fit_text(value)
    try:
        is_date = text is None or date.fromisoformat(text).isoformat() == text
    except ValueError:
        is_date = False
    if not is_date:
        raise DoesNotFit(f"{_short(value)} is not a date from 0001-01-01 to 9999-12-31")
    return text


def _fit_timestamp(value: Any) -> str | None:
    text = _fit_text(value)
    if text is None:
        return None
    try:
        _parse_timestamp(text)
    except (ValueError, OverflowError) as error:
        raise DoesNotFit(f"{_short(value)} is no time from year 1 to 9999 without a leap second") from error
    found = SECONDS.search(text)
    if found is None or (found[1] or "")[6:].strip("0"):
        raise DoesNotFit(f"{_short(value)} is finer than a microsecond")
    return text


def _parse_timestamp(text: str) -> datetime:
    return datetime.fromisoformat(text.upper()).astimezone(UTC)


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
ENUM = LabelColumn(pa.dictionary(pa.int32(), pa.string()), _fit_text)
"""Of a whole label only: inside of a struct or list, readers cannot join dictionaries of several row groups."""
DECIMAL = LabelColumn(pa.decimal128(38, 0), _fit_decimal)
DATE = LabelColumn(pa.date32(), _fit_date)
TIMESTAMP = LabelColumn(pa.timestamp("us", "UTC"), _fit_timestamp)
FORMATS = {"date": DATE, "date-time": TIMESTAMP}
FROM_JSON: dict[pa.DataType, Callable[[str], Any]] = {
    DECIMAL.type: Decimal,
    DATE.type: date.fromisoformat,
    TIMESTAMP.type: _parse_timestamp,
}
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
        return ENUM if spec.constraint.kind is ConstraintKind.CHOICE else TEXT
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
    return _column_of_scalars(name, schema, root)


def _column_of_scalars(name: str, schema: dict[str, Any], root: Any) -> LabelColumn:
    if name == "integer":
        return _column_of_integers(schema)
    if name == "string" and schema.get("format") in draft_of(root).FORMAT_CHECKER.checkers:
        return FORMATS.get(schema["format"], TEXT)
    return SCALARS.get(name, JSON_TEXT)


def _column_of_integers(schema: dict[str, Any]) -> LabelColumn:
    """64 bits unless a bound lies beyond; without bounds a larger integer does not fit."""
    bounds = [schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")]
    limits = [int(bound) for bound in bounds if isinstance(bound, int | float) and not isinstance(bound, bool)]
    if all(limit in INT64_RANGE for limit in limits):
        return INTEGER
    return DECIMAL if len(limits) > 1 and all(limit in DECIMAL_RANGE for limit in limits) else JSON_TEXT


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
    if columns == {ENUM, TEXT}:
        return TEXT
    return columns.pop() if len(columns) == 1 else JSON_TEXT


def _column_of_values(values: Sequence[Any]) -> LabelColumn:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int}:
        numbers = [value for value in values if value is not None]
        if all(number in INT64_RANGE for number in numbers):
            return INTEGER
        return DECIMAL if all(number in DECIMAL_RANGE for number in numbers) else JSON_TEXT
    if kinds and kinds <= {int, float}:
        return NUMBER
    return {frozenset({str}): ENUM, frozenset({bool}): BOOLEAN}.get(frozenset(kinds), JSON_TEXT)


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

    return LabelColumn(pa.list_(_nested(item.type)), fit)


def _struct_of(columns: Mapping[str, LabelColumn], *, keeps_all: bool) -> LabelColumn:
    """Of an object that may have other keys because its schema says nothing, those keys are in the raw text only."""

    def fit(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        if not isinstance(value, dict) or (keeps_all and not columns.keys() >= value.keys()):
            extra = sorted(value.keys() - columns.keys()) if isinstance(value, dict) else _short(value)
            raise DoesNotFit(f"no column for {extra}: say additionalProperties: true to get the label as JSON text")
        return {name: column.fit(value[name]) for name, column in columns.items() if name in value}

    return LabelColumn(pa.struct([pa.field(name, _nested(column.type)) for name, column in columns.items()]), fit)


def _nested(kind: pa.DataType) -> pa.DataType:
    return TEXT.type if kind == ENUM.type else kind


def _to_arrow(value: Any, kind: pa.DataType) -> Any:
    """A fitted value as pyarrow takes it."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {name: _to_arrow(each, kind.field(name).type) for name, each in value.items()}
    if pa.types.is_list(kind):
        return [_to_arrow(each, kind.value_type) for each in value]
    return FROM_JSON[kind](value) if kind in FROM_JSON else value


class OutputNames(NamedTuple):
    """The names of the columns that a job adds, in order; ``reasoning`` only where its rows think first."""

    label: str
    raw: str
    reasoning: str
    status: str
    error: str
    confidence: str
    meta: str


def output_names(output_column: str) -> OutputNames:
    """Return the names of the columns that a job adds."""
    return OutputNames(output_column, *(f"{output_column}_{name}" for name in OutputNames._fields[1:]))


def result_types(spec: JobSpec) -> dict[str, pa.DataType]:
    """Return the types of the columns that a job adds, in order, by their names in OutputNames."""
    text_type = pa.string() if spec.num_completions == 1 else pa.list_(pa.string())
    return {
        "label": label_column(spec).type,
        "raw": text_type,
        **({"reasoning": text_type} if spec.sampling.thinking else {}),
        "status": pa.string(),
        "error": pa.string(),
        "confidence": pa.float64(),
        "meta": META_TYPE,
    }


def result_fields(spec: JobSpec) -> list[pa.Field]:
    """Return the columns a job adds to its input, in order."""
    names = output_names(spec.output_column)
    return [pa.field(getattr(names, name), kind) for name, kind in result_types(spec).items()]


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
    types = result_types(spec)
    columns = {
        "label": pa.array([_to_arrow(row.value, types["label"]) for row in rows], types["label"]),
        "raw": _texts([row.raw for row in rows], types["raw"]),
        "reasoning": _texts([row.reasoning for row in rows], types["raw"]),
        "status": pa.array([str(row.status) for row in rows], pa.string()),
        "error": _texts([row.error for row in rows], pa.string()),
        "confidence": pa.array([confidence(row.labels) for row in rows], pa.float64()),
        "meta": meta_array(spec, chunk_index, rows, version),
    }
    keys = [None if row.content_key is None else bytes.fromhex(row.content_key) for row in rows]
    numbers = [pa.array([row.row_index for row in rows], pa.int64()), pa.array(keys, KEY_TYPE)]
    return pa.Table.from_arrays([*numbers, *map(columns.__getitem__, types)], schema=part_schema(spec))


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
