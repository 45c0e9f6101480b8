"""What pytest reports is what the result file says."""

from pathlib import Path

from ops.bench.gpu_tests import Outcome, run_pytest

TESTS = """
import pytest

def test_passes(): pass
@pytest.mark.skip(reason="no device")
def test_is_left_out(): pass
@pytest.mark.parametrize("size", [1, 2])
def test_fails_once(size): assert size == 1, "two is too large"
"""


def test_every_test_is_counted_once_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    outcome = Outcome()
    run_pytest(["test_some.py"], tmp_path, outcome)
    assert sorted(outcome.passed) == ["test_some::test_fails_once[1]", "test_some::test_passes"]
    assert outcome.skipped == {"test_some::test_is_left_out": "no device"}
    assert list(outcome.failed) == ["test_some::test_fails_once[2]"]
    assert "two is too large" in outcome.failed["test_some::test_fails_once[2]"]


def test_a_run_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    outcome = Outcome()
    run_pytest(["--no-such-option"], tmp_path, outcome)
    assert "no-such-option" in outcome.failed["--no-such-option"]


def test_a_file_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    outcome = Outcome()
    run_pytest(["test_broken.py"], tmp_path, outcome)
    assert len(outcome.failed) == 1
    assert not outcome.passed
