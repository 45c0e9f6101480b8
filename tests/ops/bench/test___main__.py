"""The command line of the benchmarks fails with one line that says what to do."""

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from ops.bench.__main__ import main


def test_an_absent_workload_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ops.bench", "engine", "--cpu", "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: no workload at ")
    assert "--data" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_setting_that_is_no_json_is_told_and_exit_code_2() -> None:
    result = CliRunner().invoke(main, ["labelling", "--set", "device=cpu"])
    assert (result.exit_code, "'device=cpu' is not NAME=VALUE" in result.output) == (2, True)


def test_the_benches_of_a_gpu_machine_need_no_package_of_jobs_and_workers() -> None:
    """Such a machine has torch and transformers; what else is carried there is the engine's."""
    code = """
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"celery", "cronsim", "gguf", "kombu", "matplotlib", "obstore", "redis"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
for name in ("__main__", "deterministic", "gpu_tests", "kernels", "labelling", "ranks", "scale", "steps"):
    importlib.import_module(f"ops.bench.{name}")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
