"""README's table of speeds is what the result files say."""

import json
from pathlib import Path

import pytest

from ops.bench.table import CHART, END, START, read_speeds, write_table
from schemas.errors import InputDataError

PEERS = {"system": "Peer 1", "results": [{"model": "Qwen3-8B", "workload": "route", "rows_per_s": 200}]}


def write_result(results: Path, model: str, workload: str, **result: object) -> None:
    document = {"commit": "c0ffee", "results": [result]}
    (results / f"engine-{model}-{workload}.json").write_text(json.dumps(document))


def test_readme_and_chart_show_the_results(repo_root: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((repo_root / "README.md").read_text())
    results = tmp_path / "results"
    results.mkdir()
    for path in (repo_root / "ops/bench/results").glob("engine-*.json"):
        (results / path.name).write_text(path.read_text())
    write_table(readme, results)
    message = "python -m ops.bench table"
    assert readme.read_text() == (repo_root / "README.md").read_text(), message
    assert (results / CHART).read_text() == (repo_root / "ops/bench/results" / CHART).read_text(), message


def test_speeds_stand_beside_the_peers_in_the_workloads_unit(tmp_path: Path) -> None:
    (tmp_path / "engine-peers.json").write_text(json.dumps(PEERS))
    write_result(tmp_path, "Qwen3-8B", "route", rows_per_s=820.4, output_tokens_per_s=1.0)
    write_result(
        tmp_path, "Qwen3-8B", "free", rows_per_s=1, output_tokens_per_s=9876.5, roofline={"share_of_bound": 0.72}
    )
    peer, speeds = read_speeds(tmp_path)
    assert peer == "Peer 1"
    assert [each[:5] for each in speeds] == [
        ("route", "Qwen3-8B", 820.4, 200, None),
        ("free", "Qwen3-8B", 9876.5, None, 0.72),
    ]
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{START}old\n{END}below\n")
    write_table(readme, tmp_path)
    above, _, *rows, _, below = readme.read_text().splitlines()
    assert (above, below) == ("above", "below")
    assert rows[2].endswith("| Qwen3-8B | 820.4 | 200.0 | 4.1 | |")
    assert rows[3].endswith("| Qwen3-8B | 9,876 | | | 72% |")
    assert "<svg" in (tmp_path / CHART).read_text()


def test_a_readme_without_a_place_for_the_table_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "engine-peers.json").write_text(json.dumps(PEERS))
    readme = tmp_path / "README.md"
    readme.write_text("nothing\n")
    with pytest.raises(InputDataError, match="has no place for the table"):
        write_table(readme, tmp_path)
    assert readme.read_text() == "nothing\n"
