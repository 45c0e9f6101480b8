"""The command line of the benchmarks fails with one line that says what to do."""

import subprocess
import sys
from pathlib import Path


def test_an_absent_workload_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.bench", "engine", "--cpu", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no workload at ")
    assert "--data" in done.stderr
    assert "Traceback" not in done.stderr
