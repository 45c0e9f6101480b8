"""A night over rows that an earlier night labelled: how long the same rows take the first time and the next.

Both are whole commands as an operator types them, from start to exit, on an empty state directory of their own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq

from ops.bench.measurement import Run, write_result
from schemas.errors import EngineError

TICKETS = Path(__file__).parent.parent / "demo" / "tickets.parquet"
ROUTE = Path(__file__).parent.parent.parent / "schemas" / "route.json"


@dataclass(frozen=True)
class NightlyBench:
    """What to measure."""

    num_rows: int = 200
    repeats: int = 3
    model: str = "smollm2"


def run_nightly_bench(bench: NightlyBench) -> list[str]:
    """Measure, write the JSON file, and return the lines to print. Raises EngineError if a run fails."""
    with tempfile.TemporaryDirectory(prefix="nm-") as directory:
        root = Path(directory)
        pq.write_table(pq.read_table(TICKETS).slice(0, bench.num_rows), root / "tickets.parquet")
        try:
            first, _ = _submit(bench, root, "first", 0)
            num_workers = len(list(root.glob("state/logs/worker-*")))
            nights = [_submit(bench, root, f"night-{repeat}", repeat) for repeat in range(bench.repeats)]
            num_started = len(list(root.glob("state/logs/worker-*"))) - num_workers
        finally:
            _run(root, "jobs.broker", "stop")
    seconds = median(run.seconds for run, _ in nights)
    ratio, num_copied = first.seconds / seconds, [summary["num_copied"] for _, summary in nights]
    runs = [first, *(run for run, _ in nights)]
    facts = {"ratio": ratio, "num_copied": num_copied, "num_workers_started": num_started}
    path = write_result("nightly-second-run", asdict(bench), runs, **facts)
    return [
        f"first night: {first.seconds:.1f} s, {first.rows_per_s:.1f} rows/s",
        f"the same rows again: {seconds:.2f} s, {ratio:.0f} times as fast; "
        f"{num_copied[0]} of {first.num_rows} rows copied, {num_started} workers started",
        f"written to {path}",
    ]


def _submit(bench: NightlyBench, root: Path, name: str, repeat: int) -> tuple[Run, dict[str, Any]]:
    start_s = time.perf_counter()
    lines = _run(
        root,
        *("jobs.submit", str(root / "tickets.parquet"), "--schema", str(ROUTE), "--column", "text", "--gold", "route"),
        *("--model", bench.model, "--name", name, "--wait", "--json"),
    )
    seconds = time.perf_counter() - start_s
    summary: dict[str, Any] = json.loads(lines[-1])
    num_valid = summary["counts"].get("ok", 0) + summary["counts"].get("closed", 0)
    system = "first night" if name == "first" else "same rows again"
    return Run(system, repeat, seconds, summary["num_rows"], 0, num_valid, os.getloadavg()[0]), summary


def _run(root: Path, module: str, *arguments: str) -> list[str]:
    """Run a verb on a state directory below ``root``; some rows may fail. Returns the lines of its output."""
    environment = {**os.environ, "NIGHTMILL_STATE_DIR": str(root / "state")}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        raise EngineError(f"{module} ended with {done.returncode}: {done.stderr}")
    return done.stdout.splitlines()
