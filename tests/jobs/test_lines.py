"""Files of lines: each line is its own row, whatever the others hold; types come from the values."""

import bz2
import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.finish import try_finish
from jobs.lines import MALFORMED
from jobs.source import ChunkReader, python_rows, scan_inputs
from schemas.errors import InputDataError
from schemas.records import InputFormat
from tests.tiny_jobs import ScriptedEngine, make_job, prompt_of, run_job, write_input

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
VALUE = st.one_of(
    st.none(), TEXT, st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.integers(0, 9) | TEXT, max_size=3), st.dictionaries(TEXT, st.integers(0, 9), max_size=3),
)  # fmt: skip
ROW = st.dictionaries(st.sampled_from(["a", "b", "c d"]), VALUE)


def read_rows(path: Path, step: int = 1000, start: int = 0) -> list[dict[str, Any]]:
    inputs = scan_inputs([str(path)])
    (file,) = inputs.files
    reader = ChunkReader()
    rows = [
        row
        for first in range(start, file.num_rows, step)
        for batch in reader.read(
            file, inputs.schema, first, min(step, file.num_rows - first), (*inputs.schema.names, MALFORMED)
        )
        for row in python_rows(batch)
    ]
    reader.close()
    return rows


def errors_in(rows: list[dict[str, Any]]) -> list[str | None]:
    return [row[MALFORMED] for row in rows]


def holds(read: Any, written: Any) -> bool:
    """Whether a cell has the value: as it was, as a number of another type, or as JSON text; no key is no value."""
    if isinstance(read, dict) and isinstance(written, dict):
        return all(holds(value, written.get(key)) for key, value in read.items()) and read.keys() >= written.keys()
    if isinstance(read, str) and not isinstance(written, str):
        return bool(json.loads(read) == written)
    return bool(read == written) and isinstance(read, bool) == isinstance(written, bool)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW | st.just("BAD"), max_size=12), step=st.integers(1, 5), data=st.data())
def test_each_json_line_is_its_row_and_a_malformed_one_moves_no_other(
    tmp_path: Path, rows: list[Any], step: int, data: st.DataObject
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join("{]\n\n" if row == "BAD" else json.dumps(row) + "\n" for row in rows))
    start = data.draw(st.integers(0, len(rows)))
    found = read_rows(path, step, start)
    assert [error is not None for error in errors_in(found)] == [row == "BAD" for row in rows[start:]]
    for row, written in zip(found, rows[start:], strict=True):
        values = {} if written == "BAD" else written
        assert all(holds(row[name], values.get(name)) for name in row.keys() - {MALFORMED})
        assert row.keys() >= values.keys()


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(TEXT, TEXT) | st.just(("one",)) | st.just(("1", "2", "3")), max_size=10),
    step=st.integers(1, 4),
)
def test_each_csv_record_is_its_row_whatever_stands_in_quotes(
    tmp_path: Path, rows: list[tuple[str, ...]], step: int
) -> None:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    path = tmp_path / "in.csv"
    path.write_bytes(text.getvalue().encode())
    found = read_rows(path, step)
    assert [error is None for error in errors_in(found)] == [len(row) == 2 for row in rows]
    assert [(r["a"], r["b"]) for r in found] == [row if len(row) == 2 else (None, None) for row in rows]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"a": NaN}', "JSON is malformed"),
        (b'{"a": 1', "Input data was truncated"),
        (b"[1]x", "trailing characters"),
        (b"3", "int instead of an object"),
        (b'{"a": "\xff"}', "utf-8"),
        (b'{"a": "\\ud800"}', "malformed line"),
        (b"[" * 100_000 + b"]" * 100_000, "recursion"),
    ],
)
def test_a_malformed_json_line_says_what_is_wrong(tmp_path: Path, line: bytes, cause: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 2}')
    rows = read_rows(path)
    assert [row["a"] for row in rows] == [1, None, 2]
    assert cause.lower() in (errors_in(rows)[1] or "").lower()


def test_a_csv_field_that_is_no_utf8_ends_its_row_only(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n1,\xff\n2,x\n")
    assert [(row["a"], row[MALFORMED]) for row in read_rows(path)] == [
        (None, "malformed line: b is not UTF-8"),
        ("2", None),
    ]


def test_columns_of_contradicting_files_widen_to_what_holds_both(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"n": 1, "x": 1, "s": "2024-01-01"}')
    (tmp_path / "2.jsonl").write_text('{"n": 2.5, "x": {"y": "z"}}')
    schema = scan_inputs([str(tmp_path)]).schema
    assert schema == pa.schema({"n": pa.float64(), "x": pa.string(), "s": pa.string()})


def test_objects_whose_keys_are_data_are_json_text(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps({"m": {f"key {i}": i}}) for i in range(1000)))
    assert read_rows(path)[999]["m"] == '{"key 999": 999}'


@pytest.mark.parametrize(("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), ("", bytes)])
def test_compressed_lines_are_read(tmp_path: Path, suffix: str, compress: Any) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    path.write_bytes(compress(b'{"a": 1}\n{"a": 2}\n'))
    assert [row["a"] for row in read_rows(path)] == [1, 2]


def test_a_json_array_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('[\n{"a": 1}]')
    with pytest.raises(InputDataError, match="one JSON array: write one object a line"):
        scan_inputs([str(tmp_path / "in.json")])


def test_a_schema_that_was_taken_for_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "route.json").write_text('{\n  "type": "object",\n  "required": []\n}\n')
    with pytest.raises(InputDataError, match=r"write one on each line \(a schema goes with --schema\)"):
        scan_inputs([str(tmp_path / "route.json")])
    for text in ('{"text": "a"}\n', '{"text": "a"}\n{"text": "b"}', '{"text":\n{"text": "b"}\n'):
        (tmp_path / "rows.jsonl").write_text(text)
        assert scan_inputs([str(tmp_path / "rows.jsonl")]).schema.names == ["text"]


def test_a_directory_is_read_in_one_format(tmp_path: Path) -> None:
    write_input(tmp_path / "data" / "a.parquet", {"a": [1]})
    (tmp_path / "data" / "labels.csv").write_text("x\n")
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    assert [file.format for file in scan_inputs([str(tmp_path)]).files] == [InputFormat.PARQUET]


def test_hive_directories_of_lines_are_columns(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    (tmp_path / "year=2024" / "a.jsonl").write_text('{"a": 1, "year": 7}')
    assert read_rows(tmp_path) == [{"a": 1, "year": "2024", MALFORMED: None}]


def test_the_same_job_from_parquet_and_from_lines_gives_the_same_labels(tmp_path: Path) -> None:
    rows = [{"text": f"ticket\n{i}, “{i}”", "n": i / 2, "tags": ["a", str(i)], "id": f"0{i}"} for i in range(9)]
    write_input(tmp_path / "p" / "in.parquet", pa.Table.from_pylist(rows))
    (tmp_path / "l" / "in.jsonl").parent.mkdir()
    (tmp_path / "l" / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    outputs = []
    for path in (tmp_path / "p", tmp_path / "l"):
        engine = ScriptedEngine(lambda request: f"label of {prompt_of(request)}")
        job = run_job(make_job(path, [path], chunk_rows=2), engine)
        assert try_finish(job)
        (output,) = scan_inputs([job.store.locate("output")]).files
        outputs.append(read_rows(Path(output.uri)))
    drop = ("label_meta", MALFORMED)
    first, second = ([{k: v for k, v in row.items() if k not in drop} for row in rows] for rows in outputs)
    assert first == second
    assert first[3]["label"].startswith("label of text: ticket\n3")


def test_malformed_lines_are_rows_of_the_output_with_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n{"text": "b"}\n')
    job = run_job(make_job(tmp_path, [path], chunk_rows=2))
    assert try_finish(job)
    rows = python_rows(job.read_part(0).to_batches()[0]) + python_rows(job.read_part(1).to_batches()[0])
    assert [(row["label_row"], row["label_status"]) for row in rows] == [(0, "ok"), (1, "input_error"), (2, "ok")]
    assert "malformed line" in rows[1]["label_error"]
    assert scan_inputs([job.store.locate("output")]).schema.names[:2] == ["text", "label"]
