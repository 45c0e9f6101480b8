"""Our engine beside its peers: same rows, same dtype, same machine, in turns.

Each run starts a fresh engine, so that no run finds another's prompts in the prefix cache. Loading is not timed.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ops.bench.measurement import Run, num_cores, summarise, write_result
from ops.bench.peers import PeerAbsentError, peer_process
from ops.bench.roofline import measure_rates, roofline
from ops.bench.systems import Answer, StaticBatches, System, huggingface_directory, nightmill
from ops.bench.tickets import TicketWorkload, load_tickets
from schemas.model_files import model_ref
from schemas.settings import EngineSettings, Settings

TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class EngineBench:
    """What to measure. ``peers``: the Python of each, None for transformers, which runs in ours."""

    data: Path
    workload: Literal["a", "b"] = "a"
    num_rows: int = 64
    repeats: int = 3
    model: str = "smollm2"
    dtype: str = "float32"
    device: str = "cpu"
    batch_rows: int = 32  # of the static batches
    max_model_len: int = 1024
    peers: Mapping[str, Path | None] = field(default_factory=lambda: {TRANSFORMERS: None})


def run_engine_bench(bench: EngineBench, settings: Settings) -> list[str]:
    """Measure, write the JSON file, and return the lines to print."""
    workload = load_tickets(bench.data, bench.workload, bench.num_rows)
    model = model_ref(bench.model, dtype=bench.dtype, max_model_len=bench.max_model_len)
    engine = settings.engine.model_copy(update={"device": bench.device})
    directory = huggingface_directory(model, settings.state_dir / "bench")
    config = _config(bench, engine)
    runs: list[Run] = []
    answers: dict[str, list[Answer]] = {}
    absent: dict[str, str] = {}
    for repeat in range(bench.repeats):
        with nightmill(model, engine, workload, _end_token(directory)) as ours:
            _measure(ours, workload, repeat, runs, answers)
            kernels, works = ours.kernels, ours.works
        for name in (name for name in bench.peers if name not in absent):
            try:
                with _peer(bench, name, directory, config["num_threads"]) as peer:
                    peer.warm_up(workload)
                    _measure(peer, workload, repeat, runs, answers)
            except PeerAbsentError as error:
                absent[name] = str(error)
    facts = _facts(runs, answers) | {"absent_peers": absent, "kernels": kernels}
    if bench.dtype == "bfloat16" and (rates := measure_rates(bench.device)):
        shape = json.loads((directory / "config.json").read_text())
        seconds = summarise(runs)[ours.name]["seconds"].median
        facts["roofline"] = roofline(shape, rates, works, seconds, is_free=False)
    path = write_result(f"engine-{bench.device}-{bench.workload}-{bench.dtype}", config, runs, **facts)
    return [*_table(runs, facts), f"written to {path}"]


@contextmanager
def _peer(bench: EngineBench, name: str, directory: Path, num_threads: int) -> "Iterator[System]":
    python = bench.peers[name]
    if name == TRANSFORMERS:
        yield StaticBatches(directory, bench.dtype, bench.device, num_threads, bench.batch_rows)
    elif python is None:
        raise PeerAbsentError(f"no Python was given for it: --peer {name}=PYTHON")
    else:
        with peer_process(python, directory, num_threads) as peer:
            yield peer


def _end_token(directory: Path) -> int:
    end: int = json.loads((directory / "config.json").read_text())["eos_token_id"]
    return end


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
    """Against each peer: the ratio of the medians, and how many rows have the same text. And how rows ended."""
    (ours, texts), *peers = [(name, [answer.text for answer in rows]) for name, rows in answers.items()]
    medians = {system: rates["rows_per_s"].median for system, rates in summarise(runs).items()}
    finish_reasons = {
        system: {reason: reasons.count(reason) for reason in sorted(set(reasons))}
        for system, reasons in ((name, [answer.finish_reason for answer in rows]) for name, rows in answers.items())
    }
    return {
        "rows_per_s_ratio": {peer: medians[ours] / medians[peer] for peer, _ in peers},
        "num_same_text": {peer: sum(a == b for a, b in zip(texts, other, strict=True)) for peer, other in peers},
        "finish_reasons": finish_reasons,
    }


def _config(bench: EngineBench, engine: EngineSettings) -> dict[str, Any]:
    return {
        "workload": bench.workload,
        "num_rows": bench.num_rows,
        "repeats": bench.repeats,
        "model": bench.model,
        "dtype": bench.dtype,
        "device": bench.device,
        "num_threads": engine.num_threads or num_cores(),
        "max_model_len": bench.max_model_len,
        "peers": list(bench.peers),
        "static_batch_rows": bench.batch_rows if TRANSFORMERS in bench.peers else None,
        "engine": engine.model_dump(mode="json"),
    }


def _table(runs: list[Run], facts: dict[str, Any]) -> list[str]:
    lines = [f"{'system':<38}{'rows/s':>8}{'(low - high)':>18}{'output tok/s':>14}{'valid':>10}"]
    for system, rates in summarise(runs).items():
        rows, tokens = rates["rows_per_s"], rates["output_tokens_per_s"]
        last = next(run for run in reversed(runs) if run.system == system)
        between = f"({rows.low:.2f} - {rows.high:.2f})"
        valid = f"{last.num_valid}/{last.num_rows}"
        lines.append(f"{system:<38}{rows.median:>8.2f}{between:>18}{tokens.median:>14.1f}{valid:>10}")
    for peer, ratio in facts["rows_per_s_ratio"].items():
        same = f"{facts['num_same_text'][peer]} of {runs[0].num_rows} rows have the same text"
        lines.append(f"{ratio:.2f} times the rows/s of {peer} (medians); {same}")
    lines += [f"{name} is absent: {reason}" for name, reason in facts["absent_peers"].items()]
    if line := facts.get("roofline"):
        rate, share = line["rates"]["flops_per_s"], line["share_of_bound"]
        lines.append(f"own prompt tokens at {share:.0%} of the measured matrix rate of {rate / 1e9:.0f} GFLOP/s")
    return lines
