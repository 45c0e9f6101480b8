"""Engines measured one after the other on one machine, within a time limit, in a file that is written after each.

A point is an engine and what it is given to do. Knows no figures of before and no parallelism but through settings.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.llm import LLM, SamplingParams
from ops.bench.labelling import WARM_UP_ROWS, count_valid, load_workload, model_directory, sampling_params
from ops.bench.measurement import write_result
from schemas.errors import NightmillError
from schemas.records import LoadFormat

DECODE = "decode "
"""A work's name begins so, and ends with the rows of each replica."""
PROMPT_TOKENS, DECODED_TOKENS = 256, 64


@dataclass(frozen=True)
class Point:
    """One engine: ``engine`` are fields of EngineSettings, ``works`` names of workloads, or "decode 64" and so on."""

    name: str
    shape: str
    works: tuple[str, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    quantization: Literal["none", "fp8"] = "none"
    load_format: LoadFormat = "random"
    expected_s: float = 60.0  # to start it and do its works: with less time left it is skipped

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine; on GPUs, devices."""
        degrees = ("data_parallel", "tensor_parallel", "context_parallel")
        ranks = 1
        for degree in degrees:
            ranks *= self.engine.get(degree, 1)
        return ranks


@dataclass
class Report:
    """A result file in the making; what is added is on disk at once."""

    name: str
    config: dict[str, Any]
    limit_s: float
    commit: str | None
    facts: dict[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.limit_s - (time.monotonic() - self.started_s)

    def add(self, **facts: Any) -> Path:
        """Write them beside those of before."""
        self.facts |= facts
        seconds = {"seconds": round(time.monotonic() - self.started_s, 1)}
        return write_result(
            self.name, self.config, [], **self.facts, **seconds, **({"commit": self.commit} if self.commit else {})
        )


def measure_points(report: Report, points: Sequence[Point], questions: Path, tokenizer: Path | None) -> list[str]:
    """Measure what there is time for, in order; returns the lines to print."""
    entries: list[dict[str, Any]] = report.facts.get("points", [])
    lines = []
    for point in points:
        entry: dict[str, Any] = asdict(point) | {"num_ranks": point.num_ranks, "results": {}}
        entries.append(entry)
        if report.left_s < point.expected_s:
            entry["skipped"] = f"{report.left_s:.0f} s left, {point.expected_s:.0f} s expected"
        else:
            try:
                with model_directory(point.shape, tokenizer) as directory:
                    for work, result in measure(point, directory, questions, entry):
                        entry["results"][work] = result
                        report.add(points=entries)
            except NightmillError as error:
                entry["error"] = str(error)
        report.add(points=entries)
        lines += describe(entry)
    return lines


def measure(
    point: Point, directory: Path, questions: Path, entry: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each work's name and result; adds to ``entry`` what the engine says of itself."""
    begin = time.perf_counter()
    with LLM(
        str(directory),
        dtype="bfloat16",
        quantization=point.quantization,
        load_format=point.load_format,
        max_model_len=4096,
        **point.engine,
    ) as llm:
        entry |= {"start_s": round(time.perf_counter() - begin, 1), "kernels": llm.hello.kernels}
        for work in point.works:
            if work.startswith(DECODE):
                yield work, decode(llm, point, int(work.removeprefix(DECODE)))
            else:
                yield work, label(llm, work, questions)
        if stats := llm.settled_stats():
            names = "num_steps", "num_expert_moves", "expert_balance", "expert_balance_unmoved"
            entry["stats"] = {name: getattr(stats, name) for name in names}


def label(llm: LLM, name: str, questions: Path) -> dict[str, Any]:
    """One pass over a labelling workload after a warm-up on its first rows."""
    workload = load_workload(name, questions)
    params = sampling_params(workload)
    llm.generate(workload.prompts[:WARM_UP_ROWS], params[:WARM_UP_ROWS])
    begin = time.perf_counter()
    done = llm.generate(workload.prompts, params)
    seconds = time.perf_counter() - begin
    num_tokens = sum(len(completion.token_ids) for completion in done)
    return {
        "seconds": seconds,
        "rows_per_s": len(done) / seconds,
        "output_tokens_per_s": num_tokens / seconds,
        "num_valid": count_valid(done, workload),
        "num_rows": len(done),
        "num_prompt_tokens": sum(each.num_prompt_tokens for each in done),
        "num_cached_tokens": sum(each.num_cached_tokens for each in done),
    }


def decode(llm: LLM, point: Point, num_rows: int) -> dict[str, Any]:
    """Decode steps of so many rows a replica whose prompts are in the cache; the first pass computes them."""
    total = num_rows * point.engine.get("data_parallel", 1)
    draw = random.Random(num_rows)
    prompts = [[draw.randint(10, 10000) for _ in range(PROMPT_TOKENS)] for _ in range(total)]
    params = SamplingParams(temperature=0.6, max_tokens=DECODED_TOKENS, ignore_eos=True)
    llm.generate(prompts, params)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "output_tokens_per_s": total * DECODED_TOKENS / seconds,
        "output_tokens_per_s_and_rank": total * DECODED_TOKENS / seconds / point.num_ranks,
    }


def describe(entry: dict[str, Any]) -> list[str]:
    """Lines about a point."""
    head = f"{entry['num_ranks']} x {entry['shape']:<18}{entry['name']:<24}"
    if cause := entry.get("skipped") or entry.get("error"):
        return [f"{head}{cause[:200]}"]
    return [
        f"{head}{work:<12}{result['output_tokens_per_s']:>10.0f} tok/s"
        + (f"{result['rows_per_s']:>9.1f} rows/s" if "rows_per_s" in result else "")
        for work, result in entry["results"].items()
    ]
