"""Points are measured on real engines; one that has no time left, or fails, is told and holds up no other."""

import json
from pathlib import Path

import pytest

from ops.bench import measurement
from ops.bench.points import Point, Report, measure_points

CPU = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.02, "max_num_seqs": 4}
PAIR = {"data_parallel": 2, "expert_parallel": 2, "expert_copies": 1, "rebalance_interval": 2}


def test_each_point_is_on_disk_with_its_result_or_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    shape, works = "DeepSeek-V3-tiny", ("decode 2",)
    points = (
        Point("pair", shape, works, CPU | PAIR, "fp8", "random_skewed", expected_s=0),
        Point("late", shape, works, CPU, expected_s=3600),
        Point("wrong", shape, works, CPU | {"tensor_parallel": 2, "expert_parallel": 2}, expected_s=0),
    )
    lines = measure_points(Report("points", {}, 600, "c0ffee"), points, tmp_path, None)
    written = json.loads((tmp_path / "points.json").read_text())
    pair, late, wrong = written["points"]
    assert [pair["num_ranks"], late["num_ranks"], wrong["num_ranks"]] == [2, 1, 2]
    result = pair["results"]["decode 2"]
    assert result["output_tokens_per_s"] == pytest.approx(2 * 2 * 64 / result["seconds"])
    assert result["output_tokens_per_s_and_rank"] == pytest.approx(result["output_tokens_per_s"] / 2)
    assert pair["stats"]["num_expert_moves"] > 0
    assert pair["stats"]["expert_balance"] > pair["stats"]["expert_balance_unmoved"]
    assert "fp8 linear" in {operation for operation, _, _ in pair["kernels"]}
    assert "3600 s expected" in late["skipped"]
    assert "engine.tensor_parallel" in wrong["error"]
    assert (late["results"], wrong["results"], written["commit"]) == ({}, {}, "c0ffee")
    assert [line.split()[3] for line in lines] == ["pair", "late", "wrong"]
