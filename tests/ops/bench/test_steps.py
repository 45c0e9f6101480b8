"""The bench of steps on a tiny model: forced text saves steps and changes no count of rows."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ops.bench import measurement, workloads
from ops.bench.steps import run_steps_bench, union_length
from tests.ops.bench.test_roofline import CONFIG


def test_forced_text_saves_steps_and_rows_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.SHAPES, "tiny", CONFIG | {"vocab_size": 49152, "max_position_embeddings": 1024})
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    questions = tmp_path / "questions.parquet"
    texts = [f"where is my card number {index}" for index in range(24)]
    categories = [("card_lost", "card_late", "top_up")[index % 3] for index in range(24)]
    pq.write_table(pa.table({"text": texts, "category": categories}), questions)
    lines = run_steps_bench("tiny", questions, None, commit="c0ffee")
    written = json.loads((tmp_path / "steps-tiny.json").read_text())
    forced, drawn = written["counts"]
    assert written["commit"] == "c0ffee"
    assert forced["num_rows"] == drawn["num_rows"] == 24
    assert forced["num_steps"] < drawn["num_steps"]
    assert forced["num_forced_tokens"] > drawn["num_forced_tokens"] == 0
    assert forced["computed_share"] > 1
    assert len(lines) == 4


def test_overlapping_spans_count_once() -> None:
    assert union_length([(0, 2), (1, 3), (1, 2), (5, 6)]) == 4
