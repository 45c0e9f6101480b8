"""What every benchmark shares: one timed run, medians over repeats, and the JSON file they end in.

Knows nothing of what is measured.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
PACKAGES = ("torch", "transformers", "xgrammar", "llguidance", "pyarrow", "celery", "numpy", "triton")
LIBRARIES = ("flashmla", "deepgemm", "deepep")  # DeepSeek's, as packaged by tokenspeed
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Run:
    """One timed pass of one system over the whole workload, loading excluded."""

    system: str
    repeat: int
    seconds: float
    num_rows: int
    num_output_tokens: int  # the end token is not counted
    num_valid: int  # accepted by the independent validator
    load_average: float  # of the machine when the run ended; above its cores somebody else was working too

    @property
    def rows_per_s(self) -> float:
        """Rows by seconds."""
        return self.num_rows / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens by seconds."""
        return self.num_output_tokens / self.seconds


@dataclass(frozen=True)
class Spread:
    """Median and extremes over repeats."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Summarise at least one value."""
    ordered = sorted(values)
    return Spread(statistics.median(ordered), ordered[0], ordered[-1])


def summarise(runs: Iterable[Run]) -> dict[str, dict[str, Spread]]:
    """Spread of each rate, by system in order of first appearance."""
    by_system: dict[str, list[Run]] = {}
    for run in runs:
        by_system.setdefault(run.system, []).append(run)
    rates: dict[str, Callable[[Run], float]] = {
        "seconds": lambda run: run.seconds,
        "rows_per_s": lambda run: run.rows_per_s,
        "output_tokens_per_s": lambda run: run.output_tokens_per_s,
    }
    return {
        system: {name: spread(rate(run) for run in group) for name, rate in rates.items()}
        for system, group in by_system.items()
    }


def percentiles(seconds: Sequence[float], scale: float) -> dict[str, float]:
    """Median, 99th percentile and mean, times ``scale``; nothing of fewer than two."""
    if len(seconds) < 2:
        return {}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "p50": round(cuts[49] * scale, 2),
        "p99": round(cuts[98] * scale, 2),
        "mean": round(statistics.fmean(seconds) * scale, 2),
    }


def write_result(name: str, config: Mapping[str, Any], runs: list[Run], **facts: Any) -> Path:
    """Write ``results/NAME.json``, replacing an older one, and return its path."""
    summary = summarise(runs)
    document = {
        "format_version": FORMAT_VERSION,
        "benchmark": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
        "config": dict(config),
        "summary": {system: {key: asdict(value) for key, value in rates.items()} for system, rates in summary.items()},
        **facts,  # a fact replaces a field of its name: a commit, where the measuring machine has no checkout
        "runs": [
            asdict(run) | {"rows_per_s": run.rows_per_s, "output_tokens_per_s": run.output_tokens_per_s} for run in runs
        ],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path


def commit() -> str:
    """The checkout's commit, with ``-dirty`` when tracked files differ from it; ``unknown`` outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory, and the GPUs if any."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "num_cores": num_cores(),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": gpus,
        "os": platform.platform(terse=True),
    }


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of Python, of this project and of the libraries under it."""
    found = {"python": platform.python_version()}
    for package in ("nightmill", *PACKAGES, *(f"tokenspeed-{library}" for library in LIBRARIES)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
