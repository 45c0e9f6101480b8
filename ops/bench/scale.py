"""A model of DeepSeek-V3's shape over all GPUs of a host: exchange, labelling, decode, balance of experts, efficiency.

One command that fits ten minutes of a machine; on a CPU it runs the same over a tiny shape. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ops.bench.exchange import CPU_ROWS, ROWS, exchange_shape, measure_exchange
from ops.bench.points import DECODE, Point, Report, measure_points
from ops.bench.ranks import describe_exchange
from ops.bench.workloads import SHAPES
from ops.device_probe import probe_apart
from schemas.records import LoadFormat

SLICE, FULL, TINY = "DeepSeek-V3-slice", "DeepSeek-V3", "DeepSeek-V3-tiny"
DECODES = (64, 128, 256, 512)
SKEWED_ROWS = 256
EPLB = {"expert_copies": 2, "rebalance_interval": 4}
PROBE_TIMEOUT_S = 120.0
GPU_ENGINE = {"kv_cache_gib": 24}
"""What is left belongs to steps: 256 experts with room for 512 rows each take 4 GiB in fp8."""
CPU_ENGINE = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.05, "max_num_seqs": 8}


@dataclass(frozen=True)
class ScaleBench:
    """What to measure; ``mtp`` are engine settings that draft by the model's own layer."""

    questions: Path
    tokenizer: Path | None
    limit_s: float
    is_cpu: bool = False
    counts: tuple[int, ...] = ()  # of ranks; empty: powers of two up to the GPUs there are
    mtp: dict[str, Any] = field(default_factory=dict)


def run_scale_bench(bench: ScaleBench, commit: str | None = None) -> list[str]:
    """Measure, write ``scale.json`` after each part (``scale-cpu.json`` on a CPU), and return the lines to print."""
    counts = bench.counts or default_counts(2 if bench.is_cpu else torch.cuda.device_count())
    device, shape = ("cpu", TINY) if bench.is_cpu else ("cuda", SLICE)
    config = {"shape": shape, "counts": counts, "quantization": "fp8", "limit_s": bench.limit_s}
    report = Report("scale-cpu" if bench.is_cpu else "scale", config, bench.limit_s, commit)
    report.add(machine=probe_apart(PROBE_TIMEOUT_S))
    times: list[dict[str, Any]] = []
    for count in counts:
        if count > 1:
            sent = exchange_shape(SHAPES[shape], count)
            times.append(measure_exchange(count, sent, device, rows=CPU_ROWS if bench.is_cpu else ROWS))
            report.add(exchange=times)
    lines = [line for each in times for line in describe_exchange(each)]
    lines += measure_points(report, scale_points(bench, counts), bench.questions, bench.tokenizer)
    table = efficiency(report.facts["points"])
    path = report.add(efficiency=table)
    for work, by_count in table.items():
        lines += [
            f"{work}: {count} ranks {each['per_rank']:.1f} a rank, {each['efficiency']:.0%} of {each['base']}"
            for count, each in by_count.items()
        ]
    return [*lines, path.name]


def default_counts(num_gpus: int) -> tuple[int, ...]:
    """1, 2, 4, 8, as far as there are GPUs."""
    return tuple(count for count in (1, 2, 4, 8) if count <= num_gpus)


def scale_points(bench: ScaleBench, counts: Sequence[int]) -> list[Point]:
    """What matters most first: the largest count, one rank, those between, balance, drafts, full depth."""
    most = max(counts)
    shape, decodes = (TINY, (4,)) if bench.is_cpu else (SLICE, DECODES)
    base = CPU_ENGINE if bench.is_cpu else GPU_ENGINE
    works = (*(() if bench.is_cpu else ("extract",)), *(f"{DECODE}{rows}" for rows in decodes))
    skewed = (f"{DECODE}{decodes[-1] if bench.is_cpu else SKEWED_ROWS}",)

    def point(
        name: str, count: int, works: tuple[str, ...], engine: Mapping[str, Any] | None = None, shape: str = shape
    ) -> Point:
        degrees = {"data_parallel": count, "expert_parallel": count} if count > 1 else {}
        is_skewed = name.startswith("skewed")
        load_format: LoadFormat = "random_skewed" if is_skewed else "random"
        expected_s = 5.0 if bench.is_cpu else 150.0 if shape == FULL else 75.0 if is_skewed else 90.0
        return Point(name, shape, works, {**base, **degrees, **(engine or {})}, "fp8", load_format, expected_s)

    points = [point("uniform", count, works) for count in (most, *(count for count in counts if count < most))]
    if most > 1:
        points.append(point("skewed, experts move", most, skewed, EPLB))
        points.append(point("skewed", most, skewed))
    if bench.mtp:
        points.append(point("drafts", most, works, bench.mtp))
    if most == 8 and not bench.is_cpu:
        points.append(point("full depth", most, ("extract", f"{DECODE}{SKEWED_ROWS}"), shape=FULL))
    return points


def efficiency(entries: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By work and ranks: speed a rank, and its share of the speed of a rank among the fewest, and among two."""
    table: dict[str, dict[str, Any]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["num_ranks"])):
        for work, result in entry["results"].items() if entry["name"] == "uniform" else ():
            speed = result.get("rows_per_s", result["output_tokens_per_s"]) / entry["num_ranks"]
            table.setdefault(work, {})[str(entry["num_ranks"])] = {"per_rank": speed}
    for by_count in table.values():
        base = next(iter(by_count))
        for each in by_count.values():
            each |= {"base": base, "efficiency": each["per_rank"] / by_count[base]["per_rank"]}
            if "2" in by_count:
                each["efficiency_from_2"] = each["per_rank"] / by_count["2"]["per_rank"]
    return table
