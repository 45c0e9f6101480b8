import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ops.doctor import Finding, Verdict, check_broker, check_jobs_root, check_packages, exit_code, main
from schemas.settings import Settings


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
    assert {"python", "torch", "broker", "jobs_root", "cpu", "model smollm2", "deep_gemm"} <= checks
