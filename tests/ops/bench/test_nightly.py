"""The benchmark of the nights runs whole submits: the second one starts no worker and copies what is labelled."""

import json
from pathlib import Path

import pytest

from ops.bench import measurement
from ops.bench.nightly import NightlyBench, run_nightly_bench
from tests.demo_model import demo_model


@pytest.mark.slow
def test_a_second_night_starts_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_model()
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    run_nightly_bench(NightlyBench(num_rows=4, repeats=1))
    document = json.loads((tmp_path / "nightly-second-run.json").read_text())
    first, second = document["runs"]
    assert first["num_rows"] == second["num_rows"] == 4
    assert document["num_workers_started"] == 0
    assert document["num_copied"] == [first["num_valid"]]
    assert second["num_valid"] == first["num_valid"] > 0
