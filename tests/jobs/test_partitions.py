"""Exports in hive directories: any hive reader, ours included, gets the rows back."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.export import export
from jobs.finish import try_finish
from jobs.partitions import MAX_PARTITIONS, write_partitioned
from jobs.source import ChunkReader, python_rows, scan_inputs
from jobs.store import open_store
from schemas.errors import InputDataError, StoreError
from tests.tiny_jobs import ScriptedEngine, make_job, prompt_of, run_job, write_input


def read_back(path: Path) -> list[dict[str, Any]]:
    inputs = scan_inputs([str(path)])
    reader = ChunkReader()
    rows = [
        row
        for file in inputs.files
        for batch in reader.read(file, inputs.schema, 0, file.num_rows, inputs.schema.names)
        for row in python_rows(batch)
    ]
    reader.close()
    return rows


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.tuples(st.none() | TEXT, st.integers(0, 2)), min_size=1, max_size=8), batch_rows=st.integers(1, 4)
)
def test_rows_come_back_whatever_the_values_spell(tmp_path: Path, rows: list[Any], batch_rows: int) -> None:
    path = tmp_path / str(hash(str(rows)))
    table = pa.table({"id": range(len(rows)), "a b": [a for a, _ in rows], "n": [n for _, n in rows]})
    batches = table.to_batches(batch_rows)
    write_partitioned(open_store(str(path)), "x.parquet", batches, table.schema, ["a b", "n"], overwrite=True)
    found = sorted(read_back(path), key=lambda row: row["id"])
    assert found == [{"id": i, "a b": a, "n": str(n)} for i, (a, n) in enumerate(rows)]


def test_a_job_is_exported_by_the_columns_of_its_directories(tmp_path: Path) -> None:
    for year in (2024, 2025):
        write_input(tmp_path / "in" / f"year={year}" / "a.parquet", {"text": [f"{year} {i}" for i in range(3)]})
    engine = ScriptedEngine(lambda request: prompt_of(request)[-1])
    job = run_job(make_job(tmp_path, [tmp_path / "in"], prompt_column="text"), engine)
    assert try_finish(job)
    export(job, "hive", str(tmp_path / "out"), partition_by=["year", "label"])
    table = ds.dataset(tmp_path / "out", partitioning="hive").to_table()
    assert table.schema.field("year").type == pa.int32()
    assert sorted(zip(*(table[name].to_pylist() for name in ("year", "label", "text")), strict=True)) == [
        (year, i, f"{year} {i}") for year in (2024, 2025) for i in range(3)
    ]
    assert "year" not in pq.ParquetFile(next((tmp_path / "out").rglob("*.parquet"))).schema_arrow.names
    with pytest.raises(StoreError, match="--overwrite"):
        export(job, "hive", str(tmp_path / "out"), partition_by=["year", "label"])
    with pytest.raises(InputDataError, match="goes with the format hive"):
        export(job, "hive", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["gone"], "no column 'gone'"),
        (["tags"], "tags is list.*: name plain columns"),
        (["id"], f"more than {MAX_PARTITIONS}"),
    ],
)
def test_columns_that_make_no_directories_are_refused(tmp_path: Path, columns: list[str], message: str) -> None:
    table = pa.table({"id": range(MAX_PARTITIONS + 1), "tags": [["x"]] * (MAX_PARTITIONS + 1)})
    with pytest.raises(InputDataError, match=message):
        write_partitioned(open_store(str(tmp_path)), "x", table.to_batches(), table.schema, columns, overwrite=False)


def test_a_field_of_a_struct_names_directories_and_the_struct_stays(tmp_path: Path) -> None:
    labels = [{"route": "bug", "why": {"n": 1}}, None, {"route": "a/b", "why": None}]
    table = pa.table({"id": [0, 1, 2], "label": labels})
    for column in ("label.route", "label.why.n"):
        out = open_store(str(tmp_path / column))
        write_partitioned(out, "x.parquet", table.to_batches(), table.schema, [column], overwrite=False)
        found = sorted(read_back(tmp_path / column), key=lambda row: row["id"])
        assert [row["label"] for row in found] == labels
    assert sorted(path.name for path in (tmp_path / "label.route").glob("label*")) == [
        "label.route=__HIVE_DEFAULT_PARTITION__",
        "label.route=a%2Fb",
        "label.route=bug",
    ]
    for column, told in {
        "label": "or a field such as label.route",
        "label.rout": "no field 'rout'; there are: route, why",
        "label.route.x": "no field 'x'; there are: none",
        "lable.route": "Did you mean 'label'",
    }.items():
        with pytest.raises(InputDataError, match=told):
            write_partitioned(
                open_store(str(tmp_path)), "x.parquet", table.to_batches(), table.schema, [column], overwrite=False
            )
