"""The bench of the batch-invariant mode on a tiny model: both modes are measured, and no answer changes in one."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ops.bench import measurement, workloads
from ops.bench.deterministic import DeterministicBench, run_deterministic_bench
from tests.ops.bench.test_roofline import CONFIG


@pytest.mark.slow
def test_both_modes_are_measured_and_answers_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.SHAPES, "tiny", CONFIG | {"vocab_size": 49152, "max_position_embeddings": 1024})
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    questions = tmp_path / "questions.parquet"
    table = pa.table({"text": [f"card {n}" for n in range(9)], "category": ["lost", "late", "lost"] * 3})
    pq.write_table(table, questions)
    bench = DeterministicBench("tiny", ("route",), questions, None, 1, {"device": "cpu", "kv_cache_gib": 0.01})
    lines = run_deterministic_bench(bench, commit="c0ffee")
    written = json.loads((tmp_path / "deterministic-tiny.json").read_text())
    (result,) = written["results"]
    assert result["answers_compared"] == 9
    assert result["answers_changed"]["deterministic"] == 0
    assert [backend for _, backend, _ in written["kernels"]["deterministic"]] == ["invariant"]
    assert [run["num_valid"] for run in written["runs"]] == [9, 9]
    assert len(lines) == 2
