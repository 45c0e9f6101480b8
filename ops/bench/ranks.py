"""Two GPUs against one: engines on either, the exchange of rows, and whether their tokens are the same.

Knows the models that one GPU holds too; ops.bench.scale has what more GPUs are for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ops.bench.exchange import exchange_shape, measure_exchange
from ops.bench.gpu_tests import ROOT, Outcome, run_pytest
from ops.bench.points import Point, Report, measure_points
from ops.bench.workloads import SHAPES
from schemas.errors import InputDataError

LITE, DENSE = "DeepSeek-V2-Lite", "Qwen3-8B"
TWO = {"data_parallel": 2, "expert_parallel": 2}
POINTS = (
    Point("one", LITE, ("extract", "free")),
    Point("data and experts", LITE, ("extract", "free"), TWO),
    Point("one", DENSE, ("extract",)),
    Point("tensor", DENSE, ("extract",), {"tensor_parallel": 2}),
    Point("data", LITE, ("extract",), {"data_parallel": 2}),
    Point("data and experts, NCCL", LITE, ("extract",), TWO | {"exchange": "collective"}),
)
PARITY = (
    (("tests/kernels/test_exchange.py",), 60.0),
    (("tests/engine/test_replica.py", "-k", "reference"), 100.0),
    (("tests/engine/test_replica.py", "-k", "auto"), 120.0),
)
"""Tests marked ``gpu``, and seconds that they may take."""
EXCHANGE_SHAPES = (LITE, "DeepSeek-V3-slice")


@dataclass(frozen=True)
class RanksBench:
    """What to measure."""

    questions: Path
    tokenizer: Path | None
    limit_s: float


def run_ranks_bench(bench: RanksBench, commit: str | None = None) -> list[str]:
    """Measure, write ``ranks.json`` after each part, and return the lines to print. Raises InputDataError."""
    import torch

    if (found := torch.cuda.device_count()) < 2:
        raise InputDataError(f"two GPUs are measured against one, and this machine has {found}")
    report = Report("ranks", {"dtype": "bfloat16", "limit_s": bench.limit_s}, bench.limit_s, commit)
    lines = measure_points(report, POINTS[:2], bench.questions, bench.tokenizer)
    times = []
    for shape in EXCHANGE_SHAPES:
        timeout_s = min(60.0, max(1.0, report.left_s))
        measured = measure_exchange(2, exchange_shape(SHAPES[shape], 2), "cuda", timeout_s=timeout_s)
        times.append({"shape": shape} | measured)
        report.add(exchange=times)
    lines += [line for each in times for line in describe_exchange(each)]
    outcome = Outcome()
    for selection, most_s in PARITY:
        if report.left_s < most_s:
            outcome.skipped[" ".join(selection)] = f"{report.left_s:.0f} s left of {most_s:.0f} s"
        else:
            run_pytest((*selection, "-m", "gpu"), ROOT, outcome, timeout_s=most_s)
        report.add(parity=asdict(outcome))
    lines += [f"parity: {len(outcome.passed)} passed, {len(outcome.failed)} failed, {len(outcome.skipped)} skipped"]
    lines += measure_points(report, POINTS[2:], bench.questions, bench.tokenizer)
    ratios = speed_ratios(report.facts["points"])
    path = report.add(ratios=ratios)
    return [*lines, *(f"{name}: {ratio:.2f} x one GPU" for name, ratio in ratios.items()), path.name]


def speed_ratios(entries: list[dict[str, Any]]) -> dict[str, float]:
    """Speed of each measured point and work by that of the point "one" of its shape: rows/s, or tokens/s of free."""
    measures = {"free": "output_tokens_per_s"}
    speeds = {
        (entry["shape"], work, entry["name"]): result[measures.get(work, "rows_per_s")]
        for entry in entries
        for work, result in entry["results"].items()
    }
    return {
        f"{shape} {work}, {name}": speed / speeds[shape, work, "one"]
        for (shape, work, name), speed in speeds.items()
        if name != "one" and (shape, work, "one") in speeds
    }


def describe_exchange(found: dict[str, Any]) -> list[str]:
    """Lines about one measurement of the exchange."""
    head = f"{found['num_ranks']} ranks, rows of {found['hidden_size']}: "
    lines = [f"{head}link {found['link_bytes_per_s'] / 1e9:.0f} GB/s"] if "link_bytes_per_s" in found else []
    lines += [f"{head}{form}: {reason}" for form, reason in found.get("forms", {}).items()]
    lines += [
        f"{head}{each['rows']:>5} rows {each['form']:<12}{each['us']:>9.1f} us, {each['share_of_link']:.0%} of the link"
        for each in found.get("times", [])
    ]
    return [*lines, *([head + found["error"]] if "error" in found else [])]
