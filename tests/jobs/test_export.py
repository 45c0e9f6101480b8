"""Exports hold exactly what the output files hold, read back by other programs' readers."""

import csv
import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from jobs.export import FORMATS, export, form_of
from jobs.finish import try_finish
from jobs.job import Job
from jobs.source import scan_inputs
from schemas.errors import InputDataError, JobError, StoreError
from tests.tiny_jobs import YES_NO, ScriptedEngine, json_schema, make_job, prompt_of, run_job, write_input


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two shards with awkward values, labelled by an object."""
    columns = {
        "text": ['plain, "quoted"\nand more', "ünï", None],
        "data": [b"\xff\x00", b"", None],
        "day": [datetime.date(2026, 11, 30)] * 3,
        "tags": pa.array([["a"], [], None], pa.list_(pa.string())),
    }
    for name in "ab":
        write_input(tmp_path / "in" / f"{name}.parquet", columns)
    schema = {
        "type": "object",
        "properties": {"k": {"type": "string"}},
        "required": ["k"],
        "additionalProperties": False,
    }
    job = make_job(tmp_path, [tmp_path / "in"], prompt_column="text", constraint=json_schema(schema))
    return run_job(job, ScriptedEngine(lambda request: json.dumps({"k": prompt_of(request)[:5]})))


def rows_of(job: Job) -> list[dict[str, object]]:
    success = job.success()
    assert success is not None
    return [row for file in success.outputs for row in pq.read_table(file.uri).to_pylist()]


def test_csv_and_jsonl_hold_every_row_and_value(job: Job, tmp_path: Path) -> None:
    assert try_finish(job)
    for form in ("csv", "jsonl"):
        export(job, form, str(tmp_path / "to" / f"all.{form}"))
    with (tmp_path / "to" / "all.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    lines = [json.loads(line) for line in (tmp_path / "to" / "all.jsonl").read_text().splitlines()]
    rows = rows_of(job)
    assert len(table) == len(lines) == len(rows) == 6
    assert [row["text"] or None for row in table] == [line["text"] for line in lines] == [row["text"] for row in rows]
    assert [row["data"] for row in table[:2]] == [line["data"] for line in lines[:2]] == ["/wA=", ""]
    assert [line["label"] for line in lines] == [row["label"] for row in rows]
    assert json.loads(table[0]["label"]) == rows[0]["label"] == {"k": "plain"}
    assert (table[0]["label_status"], table[2]["label_status"], table[2]["label"]) == ("ok", "input_error", "")
    assert (table[0]["day"], lines[0]["day"], table[0]["tags"], lines[1]["tags"]) == (
        "2026-11-30",
        "2026-11-30",
        '["a"]',
        [],
    )
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["all.csv", "all.jsonl"]


def test_a_dataset_directory_names_its_files_and_can_be_labelled_again(job: Job, tmp_path: Path) -> None:
    assert try_finish(job)
    export(job, "hf", str(tmp_path / "set"))
    _, front, card = (tmp_path / "set" / "README.md").read_text().split("---\n")
    (config,) = yaml.safe_load(front)["configs"]
    (split,) = config["data_files"]
    files = sorted((tmp_path / "set").glob(split["path"]))
    assert [file.name for file in files] == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert [row for file in files for row in pq.read_table(file).to_pylist()] == rows_of(job)
    assert "6 rows" in card
    assert sum(file.num_rows for file in scan_inputs([str(tmp_path / "set")]).files) == 6


@pytest.mark.parametrize("form", sorted({*FORMATS} - {"openai-batch", "hive"}))
def test_nothing_is_replaced_unasked_and_nothing_unfinished_exported(job: Job, tmp_path: Path, form: str) -> None:
    target = str(tmp_path / "to" / "x")
    with pytest.raises(JobError, match="has not ended"):
        export(job, form, target)
    assert try_finish(job)
    export(job, form, target)
    with pytest.raises(StoreError, match="exists: choose another --to, or pass --overwrite"):
        export(job, form, target)
    export(job, form, target, overwrite=True)
    assert list(tmp_path.rglob("to/**/_staging")) == []


@pytest.mark.parametrize(("location", "form"), [("a/x.CSV", "csv"), ("s3://b/x.jsonl", "jsonl"), ("a/v1.2", "hf")])
def test_the_ending_says_the_format(location: str, form: str) -> None:
    assert form_of(location) == form


@pytest.mark.parametrize("location", ["x.xlsx", "s3://bucket/x.parquet", "x.jsonl.gz"])
def test_an_ending_of_another_format_is_no_name_of_a_data_set(location: str) -> None:
    with pytest.raises(InputDataError, match=r"a file is \.csv or \.jsonl; else say --format"):
        form_of(location)


def test_a_refused_export_leaves_nothing_behind(job: Job, tmp_path: Path) -> None:
    assert try_finish(job)
    with pytest.raises(JobError, match="no request bodies"):
        export(job, "openai-batch", str(tmp_path / "to" / "x.jsonl"))
    assert not (tmp_path / "to").exists()


def test_a_label_out_of_a_closed_set_is_plain_text_in_csv(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path, constraint=YES_NO))
    assert try_finish(job)
    export(job, "csv", str(tmp_path / "all.csv"))
    with (tmp_path / "all.csv").open(newline="") as file:
        assert [row["label"] for row in csv.DictReader(file)] == ["yes"] * 10
