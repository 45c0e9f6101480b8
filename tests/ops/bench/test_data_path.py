"""The data path's benchmark runs whole jobs: every row comes out labelled."""

import json
from pathlib import Path

import pytest

from ops.bench import measurement
from ops.bench.data_path import DataPathBench, run_data_path_bench
from tests.demo_model import demo_model


def test_every_row_of_every_repeat_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_model()
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    lines = run_data_path_bench(DataPathBench(num_rows=3000, repeats=2))
    document = json.loads((tmp_path / "jobs-data-path.json").read_text())
    assert [run["num_valid"] for run in document["runs"]] == [3000, 3000]
    assert set(document["phase_seconds"]) == {"plan", "label", "commit", "finish"}
    assert lines[0].startswith("data path: ")
