"""Our engine against static batches of transformers: same rows, same dtype, same machine, in turns.

Each of our runs starts a fresh engine, so that no run finds another's prompts in the prefix cache.
Loading is not timed.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ops.bench.measurement import Run, num_cores, summarise, write_result
from ops.bench.systems import Answer, StaticBatches, System, huggingface_directory, nightmill
from ops.bench.tickets import TicketWorkload, load_tickets
from schemas.model_files import model_ref
from schemas.settings import EngineSettings, Settings


@dataclass(frozen=True)
class EngineBench:
    """What to measure."""

    data: Path
    workload: Literal["a", "b"] = "a"
    num_rows: int = 64
    repeats: int = 3
    model: str = "smollm2"
    dtype: str = "float32"
    device: str = "cpu"
    batch_rows: int = 32  # of the static batches
    max_model_len: int = 1024
    has_peer: bool = True


def run_engine_bench(bench: EngineBench, settings: Settings) -> list[str]:
    """Measure, write the JSON file, and return the lines to print."""
    workload = load_tickets(bench.data, bench.workload, bench.num_rows)
    model = model_ref(bench.model, dtype=bench.dtype, max_model_len=bench.max_model_len)
    engine = settings.engine.model_copy(update={"device": bench.device})
    num_threads = engine.num_threads or num_cores()
    directory = huggingface_directory(model, settings.state_dir / "bench")
    peer = StaticBatches(directory, model.dtype, bench.device, num_threads, bench.batch_rows)
    if bench.has_peer:
        peer.warm_up(workload)
    runs: list[Run] = []
    answers: dict[str, list[Answer]] = {}
    for repeat in range(bench.repeats):
        with nightmill(model, engine, workload, peer.eos_token_id) as ours:
            _measure(ours, workload, repeat, runs, answers)
        if bench.has_peer:
            _measure(peer, workload, repeat, runs, answers)
    facts = _facts(runs, answers)
    config = _config(bench, engine, num_threads)
    path = write_result(f"engine-{bench.device}-{bench.workload}-{bench.dtype}", config, runs, **facts)
    return [*_table(runs, facts), f"written to {path}"]


def _measure(
    system: System, workload: TicketWorkload, repeat: int, runs: list[Run], answers: dict[str, list[Answer]]
) -> None:
    start = time.perf_counter()
    answered = system.run(workload)
    seconds = time.perf_counter() - start
    answers[system.name] = answered
    runs.append(
        Run(
            system=system.name,
            repeat=repeat,
            seconds=seconds,
            num_rows=len(answered),
            num_output_tokens=sum(answer.num_tokens for answer in answered),
            num_valid=workload.num_valid([answer.text for answer in answered]),
            load_average=os.getloadavg()[0],
        )
    )


def _facts(runs: list[Run], answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """The ratio of the medians, how rows ended, and how many rows both systems answered with the same text."""
    medians = [rates["rows_per_s"].median for rates in summarise(runs).values()]
    texts = [[answer.text for answer in rows] for rows in answers.values()]
    finish_reasons = {
        system: {reason: reasons.count(reason) for reason in sorted(set(reasons))}
        for system, reasons in ((name, [answer.finish_reason for answer in rows]) for name, rows in answers.items())
    }
    return {
        "rows_per_s_ratio": medians[0] / medians[1] if len(medians) > 1 else None,
        "num_same_text": sum(a == b for a, b in zip(*texts, strict=True)) if len(texts) > 1 else None,
        "finish_reasons": finish_reasons,
    }


def _config(bench: EngineBench, engine: EngineSettings, num_threads: int) -> dict[str, Any]:
    return {
        "workload": bench.workload,
        "num_rows": bench.num_rows,
        "repeats": bench.repeats,
        "model": bench.model,
        "dtype": bench.dtype,
        "device": bench.device,
        "num_threads": num_threads,
        "max_model_len": bench.max_model_len,
        "static_batch_rows": bench.batch_rows if bench.has_peer else None,
        "engine": engine.model_dump(mode="json"),
    }


def _table(runs: list[Run], facts: dict[str, Any]) -> list[str]:
    header = f"{'system':<38}{'rows/s':>8}{'(low - high)':>18}{'output tok/s':>14}{'valid':>10}"
    lines = [header]
    for system, rates in summarise(runs).items():
        rows, tokens = rates["rows_per_s"], rates["output_tokens_per_s"]
        last = next(run for run in reversed(runs) if run.system == system)
        between = f"({rows.low:.2f} - {rows.high:.2f})"
        valid = f"{last.num_valid}/{last.num_rows}"
        lines.append(f"{system:<38}{rows.median:>8.2f}{between:>18}{tokens.median:>14.1f}{valid:>10}")
    if facts["rows_per_s_ratio"] is not None:
        same = f"{facts['num_same_text']} of {runs[0].num_rows} rows have the same text"
        lines.append(f"ratio of the medians in rows/s: {facts['rows_per_s_ratio']:.2f}; {same}")
    return lines
