import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ops.doctor import (
    Finding,
    Verdict,
    _examine_device,
    _examine_link,
    _examine_topology,
    check_broker,
    check_jobs_root,
    check_packages,
    exit_code,
    main,
)
from schemas.settings import EngineSettings, Settings


def test_the_installed_packages_are_fine(tmp_path: Path) -> None:
    assert {finding.verdict for finding in check_packages(Settings(state_dir=tmp_path))} == {Verdict.OK}


def test_an_unreachable_broker_is_broken_and_says_what_to_do(tmp_path: Path) -> None:
    (finding,) = check_broker(Settings(state_dir=tmp_path, broker_url="redis://127.0.0.1:1/0"))
    assert finding.verdict is Verdict.BROKEN
    assert finding.remedy


def test_the_embedded_broker_is_not_started(tmp_path: Path) -> None:
    (finding,) = check_broker(Settings(state_dir=tmp_path / "state"))
    assert (finding.verdict, "not running" in finding.detail) == (Verdict.OK, True)
    assert not (tmp_path / "state").exists()


def test_a_jobs_root_that_cannot_be_written_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = check_jobs_root(Settings(state_dir=tmp_path, jobs_root=str(tmp_path / "file" / "jobs")))
    assert finding.verdict is Verdict.BROKEN


def test_a_jobs_root_is_left_as_it_was(tmp_path: Path) -> None:
    root = tmp_path / "jobs"
    root.mkdir()
    (finding,) = check_jobs_root(Settings(state_dir=tmp_path, jobs_root=str(root)))
    assert finding.verdict is Verdict.OK
    assert [path for path in root.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.OK, 0), (Verdict.NOTE, 0), (Verdict.BROKEN, 1)])
def test_only_what_is_broken_fails(verdict: Verdict, code: int) -> None:
    assert exit_code([Finding("a", Verdict.OK, ""), Finding("b", verdict, "")]) == code


@pytest.mark.slow
def test_the_doctor_sees_devices_and_kernels(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--state-dir", str(tmp_path), "--json"])
    report = json.loads(result.stdout)
    assert (result.exit_code, report["is_healthy"]) == (0, True), result.output
    checks = {finding["check"] for finding in report["findings"]}
    expected = {"python", "torch", "broker", "jobs_root", "versions", "cpu", "ranks", "model smollm2", "deep_gemm"}
    assert expected <= checks


@pytest.mark.parametrize(
    ("engine", "num_gpus", "verdict", "text"),
    [
        ({}, 0, Verdict.OK, "an engine of 1 on the CPU"),
        ({"data_parallel": 2}, 2, Verdict.OK, "an engine of 2 on a GPU each"),
        ({"data_parallel": 2, "device": "cpu"}, 1, Verdict.OK, "an engine of 2 on the CPU"),
        ({"data_parallel": 2, "device": "cuda:1"}, 2, Verdict.BROKEN, "an engine of 2 on 1 GPUs from cuda:1 on"),
        ({"tensor_parallel": 4, "device": "cuda"}, 0, Verdict.BROKEN, "an engine of 4 on 0 GPUs from cuda:0 on"),
        ({"expert_parallel": 2}, 8, Verdict.BROKEN, "does not divide the 1 ranks"),
    ],
)
def test_ranks_need_their_devices(engine: dict[str, Any], num_gpus: int, verdict: Verdict, text: str) -> None:
    finding = _examine_topology(EngineSettings(**engine), num_gpus)
    assert finding.verdict is verdict
    assert text in finding.detail


def test_a_library_that_a_gpu_lacks_comes_with_what_to_install() -> None:
    choices = [
        {"operation": "experts", "backend": "triton", "reason": "deep_gemm cannot be imported: no module"},
        {"operation": "linear", "backend": "torch", "reason": "cuBLAS"},
    ]
    device = {"device": "cuda:0", "description": "H200", "kernels": "triton", "choices": choices}
    first, missing, there = _examine_device(device)
    assert (first.verdict, missing.verdict, there.verdict) == (Verdict.OK, Verdict.NOTE, Verdict.OK)
    assert "[hopper]" in missing.remedy
    assert _examine_link({"pair": "a - b", "is_direct": False, "num_nvlinks": 0}).verdict is Verdict.NOTE
    assert "18 NVLinks" in _examine_link({"pair": "a - b", "is_direct": True, "num_nvlinks": 18}).detail
