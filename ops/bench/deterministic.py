"""What the batch-invariant mode costs, and whether it does what it says: the same workloads with it and without.

Some rows are then asked again in a batch of their own, which finds the prompts in the prefix cache: an answer that
changed depended on its batch. Both modes run on one machine, one after the other.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.llm import LLM
from ops.bench.labelling import WARM_UP_ROWS, load_workload, model_directory, run_of, sampling_params
from ops.bench.measurement import Run, summarise, write_result
from ops.bench.workloads import Workload

NUM_ASKED_AGAIN = 37
MODES = {"default": False, "deterministic": True}


@dataclass(frozen=True)
class DeterministicBench:
    """What to measure; ``engine`` are fields of EngineSettings."""

    shape: str
    workloads: tuple[str, ...]
    questions: Path
    tokenizer: Path | None  # directory with tokenizer.json; None: the demo model's
    repeats: int
    engine: dict[str, Any]


def run_deterministic_bench(bench: DeterministicBench, commit: str | None = None) -> list[str]:
    """Measure, write ``deterministic-SHAPE.json`` and return the lines to print."""
    workloads = [load_workload(name, bench.questions) for name in bench.workloads]
    runs: list[Run] = []
    changed: dict[str, int] = {}
    kernels: dict[str, Any] = {}
    with model_directory(bench.shape, bench.tokenizer) as directory:
        for repeat in range(bench.repeats):
            for mode, is_deterministic in MODES.items():
                llm = LLM(
                    str(directory),
                    dtype="bfloat16",
                    load_format="random",
                    deterministic=is_deterministic,
                    **bench.engine,
                )
                with llm:
                    kernels[mode] = llm.hello.kernels
                    for workload in workloads:
                        name = f"{workload.name}, {mode}"
                        run, num_changed = _measure(llm, workload, name, repeat)
                        runs.append(run)
                        changed[name] = changed.get(name, 0) + num_changed
    medians = {name: spreads["rows_per_s"].median for name, spreads in summarise(runs).items()}
    results = [
        {
            "workload": workload.name,
            "throughput_cost": 1 - medians[f"{workload.name}, deterministic"] / medians[f"{workload.name}, default"],
            "answers_changed": {mode: changed[f"{workload.name}, {mode}"] for mode in MODES},
            "answers_compared": len(workload.prompts[-NUM_ASKED_AGAIN:]) * bench.repeats,
        }
        for workload in workloads
    ]
    config = {"engine": bench.engine, "dtype": "bfloat16", "repeats": bench.repeats}
    facts = {"results": results, "kernels": kernels} | ({"commit": commit} if commit else {})
    path = write_result(f"deterministic-{bench.shape}", config, runs, **facts)
    return [*(_line(result, medians) for result in results), path.name]


def _measure(llm: LLM, workload: Workload, name: str, repeat: int) -> tuple[Run, int]:
    """One timed pass, then some of its rows again: how many have another answer."""
    params = sampling_params(workload)
    llm.generate(workload.prompts[:WARM_UP_ROWS], params[:WARM_UP_ROWS])
    start = time.perf_counter()
    done = llm.generate(workload.prompts, params)
    run = run_of(name, repeat, time.perf_counter() - start, done, workload)
    again = llm.generate(workload.prompts[-NUM_ASKED_AGAIN:], params[-NUM_ASKED_AGAIN:])
    pairs = zip(done[-NUM_ASKED_AGAIN:], again, strict=True)
    return run, sum(one.token_ids != other.token_ids for one, other in pairs)


def _line(result: dict[str, Any], medians: dict[str, float]) -> str:
    name = result["workload"]
    rates = ", ".join(f"{mode} {medians[f'{name}, {mode}']:.1f} rows/s" for mode in MODES)
    changed = ", ".join(f"{count} {mode}" for mode, count in result["answers_changed"].items())
    return (
        f"{name:<10}{rates}: costs {result['throughput_cost']:.1%}; "
        f"of {result['answers_compared']} answers in another batch changed: {changed}"
    )
