"""Results are medians over repeats, written with what is needed to read them later."""

import json
from pathlib import Path

import pytest

from ops.bench import measurement
from ops.bench.measurement import Run, Spread, spread, summarise, write_result


def run(system: str, seconds: float) -> Run:
    return Run(system, 0, seconds, num_rows=10, num_output_tokens=50, num_valid=10, load_average=0.5)


def test_a_spread_is_the_median_and_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_each_system_is_summarised_by_itself() -> None:
    summary = summarise([run("ours", 1.0), run("peer", 4.0), run("ours", 2.0)])
    assert list(summary) == ["ours", "peer"]
    assert summary["ours"]["rows_per_s"] == Spread(7.5, 5.0, 10.0)
    assert summary["peer"]["output_tokens_per_s"].median == 12.5


def test_a_result_says_on_what_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    path = write_result("engine-cpu-a", {"repeats": 1}, [run("ours", 2.0)], ratio=None)
    document = json.loads(path.read_text())
    assert {"commit", "hardware", "versions", "config", "summary", "runs", "measured_at"} <= set(document)
    assert document["hardware"]["num_cores"] >= 1
    assert document["summary"]["ours"]["rows_per_s"]["median"] == 5.0
