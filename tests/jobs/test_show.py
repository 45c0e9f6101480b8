from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.finish import try_finish
from jobs.show import MIN_COLUMN_WIDTH, fit_widths, print_table, show_summary
from tests.tiny_jobs import ScriptedEngine, json_schema, make_job, run_job, write_input

ROUTES = {"type": "object", "properties": {"route": {"enum": ["bug", "other"]}, "why": {"type": "string"}}}


def summary(tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: str, **fields: Any) -> list[str]:
    columns = {"id": ["1", "2"], "extra": ["e", "f"], "text": ["it crashes", "hello"], "kind": ["bug", "other"]}
    job = make_job(tmp_path, [write_input(tmp_path / "in.parquet", columns)], **fields)
    assert try_finish(run_job(job, ScriptedEngine(answer)))
    show_summary(job, job.state(), as_json=False)
    return capsys.readouterr().out.splitlines()


def test_the_first_rows_show_what_was_asked_gold_and_each_field_of_the_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"prompt_column": "text", "gold_column": "kind", "constraint": json_schema(ROUTES)}
    lines = summary(tmp_path, capsys, '{"route": "bug", "why": "it said so"}', **fields)
    assert lines[0].split() == ["text", "kind", "label.route", "label.why", "label_status"]
    assert [cell.strip() for cell in lines[1].split("  ") if cell] == ["it crashes", "bug", "bug", "it said so", "ok"]


def test_a_prompt_column_that_is_not_kept_gives_way_to_the_first_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = summary(tmp_path, capsys, "yes", prompt_column="text", columns=("id",))
    assert lines[0].split() == ["id", "label", "label_status"]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(0, 200))
def test_the_widest_columns_give_way_until_a_table_fits(natural: list[int], available: int) -> None:
    widths = fit_widths(natural, available)
    assert sum(widths) <= available or max(widths) <= MIN_COLUMN_WIDTH
    assert all(width <= wish for width, wish in zip(widths, natural, strict=True))
    cut = [width for width, wish in zip(widths, natural, strict=True) if width < wish]
    assert all(width >= max(widths) - 1 for width in cut)


def test_a_table_keeps_one_line_a_row_and_the_columns_that_must_be_whole(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["id", "text"], [["x" * 50, "word " * 60]], num_whole=1)
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith("x" * 50 + "  word ")
    assert line.endswith("…")
