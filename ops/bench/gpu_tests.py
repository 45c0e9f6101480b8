"""Run the tests that need a GPU, and write down on what and at which commit they passed. Knows no test.

The kernels' tests run on whatever device there is, so that all of them belong to it; elsewhere the mark decides.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from ops.bench.measurement import write_result
from schemas.errors import InputDataError

ROOT = Path(__file__).resolve().parents[2]
SELECTIONS = (("tests/kernels",), ("tests/engine", "-m", "gpu"))
"""Arguments of one run of pytest each."""


@dataclass
class Outcome:
    """Test names by what became of them."""

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # with the first line of the cause
    skipped: dict[str, str] = field(default_factory=dict)  # with the reason


def run_gpu_tests(processes: int, commit: str | None = None) -> tuple[Outcome, list[str]]:
    """Run them, write the result file, and return the lines to print. Raises InputDataError without the tests."""
    if not (ROOT / "tests").is_dir() or importlib.util.find_spec("pytest") is None:
        raise InputDataError(f"the tests need a checkout with tests/, not {ROOT}, and pytest: pip install -e '.[dev]'")
    outcome, start = Outcome(), time.monotonic()
    for selection in SELECTIONS:
        run_pytest([*selection, *(["-n", str(processes)] if processes > 1 else [])], ROOT, outcome)
    seconds = round(time.monotonic() - start, 1)
    facts = {"passed": sorted(outcome.passed), "failed": outcome.failed, "skipped": outcome.skipped, "seconds": seconds}
    config = {"selections": [" ".join(selection) for selection in SELECTIONS]}
    path = write_result("gpu-tests", config, [], **facts, **({"commit": commit} if commit else {}))
    counts = f"{len(outcome.passed)} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"
    failures = [f"FAILED {name}: {cause}" for name, cause in outcome.failed.items()]
    return outcome, [*failures, f"{counts} in {seconds:.0f} s  {path.name}"]


def run_pytest(arguments: Sequence[str], directory: Path, outcome: Outcome, *, timeout_s: float | None = None) -> None:
    """Add what pytest's report says of each test; a run without a report, or in vain, is a failure of its own."""
    with TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        flags = ["-q", "-p", "no:cacheprovider", "-W", "ignore"]  # a GPU machine's own libraries may warn
        command = [sys.executable, "-m", "pytest", *flags, f"--junitxml={report}", *arguments]
        with subprocess.Popen(
            command,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the ranks that its tests have started, too
                outcome.failed[" ".join(arguments)] = f"stopped after {timeout_s:.0f} s"
                return
        if not report.is_file():
            outcome.failed[" ".join(arguments)] = printed.strip()[-500:]
            return
        for case in ET.parse(report).getroot().iter("testcase"):
            _add(case, outcome)


def _add(case: ET.Element, outcome: Outcome) -> None:
    name = f"{case.get('classname')}::{case.get('name')}"
    skip = case.find("skipped")
    cause = next((found for kind in ("failure", "error") if (found := case.find(kind)) is not None), None)
    if cause is not None:
        outcome.failed[name] = (cause.get("message") or "").splitlines()[0][:300]
    elif skip is not None:
        outcome.skipped[name] = skip.get("message") or ""
    else:
        outcome.passed.append(name)
