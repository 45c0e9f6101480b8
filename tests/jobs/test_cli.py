import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from jobs.cli import ending_like_ctrl_c, load_settings, run_reporting_errors, verb
from schemas.errors import BrokerError, InputDataError, NightmillError
from schemas.settings import Settings

VERBS = ("submit", "status", "resume", "list", "cancel", "pause", "verify")


@pytest.mark.parametrize(("error", "code"), [(InputDataError("no file"), 2), (BrokerError("no broker"), 1)])
def test_an_error_is_one_line_and_its_exit_code(
    error: NightmillError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    assert run_reporting_errors(fail) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        run_reporting_errors(lambda: 1 // 0)


def test_an_interrupt_ends_with_130() -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    assert run_reporting_errors(interrupt) == 130


def test_flags_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NIGHTMILL_BROKER_URL", "redis://environment/0")
    monkeypatch.setenv("NIGHTMILL_JOBS_ROOT", "/environment")
    seen: list[Settings] = []

    @verb("look")
    @click.option("--code", type=int)
    def look(settings: Settings, *, code: int) -> int:
        """Look."""
        seen.append(settings)
        return code

    arguments = ["--jobs-root", str(tmp_path), "--state-dir", str(tmp_path), "--code", "7", "--log-level", "info"]
    result = CliRunner().invoke(look, arguments)
    assert result.exit_code == 7, result.output
    assert seen[0].jobs_root == str(tmp_path)
    assert seen[0].broker_url == "redis://environment/0"
    assert seen[0].log.level == "INFO"


def test_a_bad_log_level_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(NightmillError, match=r"log\.level"):
        load_settings({"state_dir": tmp_path}, "loud")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_a_terminal_is_an_interrupt_within_the_block_only(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ending_like_ctrl_c():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_nohup_keeps_its_word() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_like_ctrl_c():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_and_the_settings_flags(name: str) -> None:
    result = CliRunner().invoke(importlib.import_module(f"jobs.{name}").main, ["--help"])
    assert result.exit_code == 0
    assert all(flag in result.stdout for flag in ("--broker-url", "--jobs-root", "--state-dir", "--log-level"))


def test_help_loads_neither_parquet_nor_celery() -> None:
    code = (
        "import sys, jobs.submit\n"
        "heavy = {'pyarrow', 'celery', 'redis', 'torch', 'jsonschema', 'obstore'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_package_run_by_itself_names_every_verb_that_the_readme_does(repo_root: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "jobs"], cwd=repo_root, capture_output=True, text=True, check=False)
    named = set(re.findall(r"^python -m (jobs\.\w+)  +\S", done.stderr, flags=re.MULTILINE))
    assert (done.returncode, done.stdout) == (2, "")
    assert set(re.findall(r"python -m (jobs\.\w+)", (repo_root / "README.md").read_text())) <= named
