"""Our engine on the three labelling workloads, over a model shape with random weights. Knows no peer.

The clock runs from prompt texts to finished completions through the engine's pipe, tokenisation included; loading and a
warm-up are not timed.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from engine.llm import LLM, SamplingParams
from ops.bench.measurement import Run, summarise, write_result
from ops.bench.roofline import Rates, RowWork, measure_rates, roofline
from ops.bench.workloads import SHAPES, Workload, extract, free, prefill, route
from schemas.constraints import load_constraint, make_validator
from schemas.errors import InputDataError
from schemas.records import Completion, ConstraintKind

WARM_UP_ROWS = 64  # of the workload itself, as its peers were warmed up


@dataclass(frozen=True)
class LabellingBench:
    """What to measure; ``engine`` are fields of EngineSettings."""

    shape: str
    workloads: tuple[str, ...]
    questions: Path
    tokenizer: Path | None  # directory with tokenizer.json; None: the demo model's
    repeats: int
    engine: dict[str, Any]
    quantization: Literal["none", "fp8"] = "none"


def run_labelling_bench(bench: LabellingBench, commit: str | None = None) -> list[str]:
    """Measure, write one JSON file a workload, and return the lines to print."""
    lines = [f"{'workload':<10}{'rows/s':>10}{'output tok/s':>14}{'seconds':>10}{'valid':>14}"]
    rates = measure_rates()
    with model_directory(bench.shape, bench.tokenizer) as directory:
        for name in bench.workloads:
            workload = load_workload(name, bench.questions)
            runs, result, kernels = _measure(bench, workload, directory, rates)
            numbers = {"dtype": "bfloat16", "quantization": bench.quantization}
            config = {"engine": bench.engine, **numbers, "repeats": bench.repeats}
            facts = {"results": [result], "kernels": kernels} | ({"commit": commit} if commit else {})
            suffix = "" if bench.quantization == "none" else f"-{bench.quantization}"
            path = write_result(f"engine-{bench.shape}-{name}{suffix}", config, runs, **facts)
            lines.append(
                f"{name:<10}{result['rows_per_s']:>10.1f}{result['output_tokens_per_s']:>14.1f}"
                f"{runs[-1].seconds:>10.2f}{f'{runs[-1].num_valid}/{runs[-1].num_rows}':>14}  {path.name}"
            )
    return lines


def _measure(
    bench: LabellingBench, workload: Workload, directory: Path, rates: Rates | None
) -> tuple[list[Run], dict[str, Any], Any]:
    """Time the workload on a fresh engine for each repeat, so that no run finds its rows in the prefix cache."""
    params = sampling_params(workload)
    runs: list[Run] = []
    for repeat in range(bench.repeats):
        with LLM(
            str(directory),
            dtype="bfloat16",
            quantization=bench.quantization,
            load_format="random",
            **bench.engine,
        ) as llm:
            llm.generate(workload.prompts[:WARM_UP_ROWS], params[:WARM_UP_ROWS])
            start = time.perf_counter()
            done = llm.generate(workload.prompts, params)
            runs.append(run_of("nightmill", repeat, time.perf_counter() - start, done, workload))
            kernels = llm.hello.kernels
    medians = {name: each.median for name, each in summarise(runs)["nightmill"].items()}
    rows = [RowWork(each.num_prompt_tokens, each.num_cached_tokens, len(each.token_ids)) for each in done]
    result = {
        "model": bench.shape,
        "workload": workload.name,
        "rows_per_s": medians["rows_per_s"],
        "output_tokens_per_s": medians["output_tokens_per_s"],
        "num_prompt_tokens": sum(completion.num_prompt_tokens for completion in done),
        "num_cached_tokens": sum(completion.num_cached_tokens for completion in done),
        "finish_reasons": Counter(str(completion.finish_reason) for completion in done),
    }
    if rates and bench.quantization == "none":  # the rates are those of bfloat16
        is_free = workload.schema is None
        result["roofline"] = roofline(SHAPES[bench.shape], rates, rows, medians["seconds"], is_free=is_free)
    return runs, result, kernels


def load_workload(name: str, questions: Path) -> Workload:
    """Make a workload by name. Raises InputDataError where its questions are not."""
    if name == "free":
        return free()
    if not questions.is_file():
        raise InputDataError(f"{questions} is not there: pass --questions with the path of banking77.parquet")
    return {"route": route, "extract": extract, "prefill": prefill}[name](questions)


def sampling_params(workload: Workload) -> list[SamplingParams]:
    """One for each prompt."""
    constrained = {"so_args": {"schema_type": "json", "schema": workload.schema}} if workload.schema else {}
    shared = {"temperature": 0.0, **workload.sampling, **constrained}
    by_budget = {budget: SamplingParams(max_tokens=budget, **shared) for budget in set(workload.max_tokens)}
    return [by_budget[budget] for budget in workload.max_tokens]


def run_of(system: str, repeat: int, seconds: float, done: list[Completion], workload: Workload) -> Run:
    """A timed pass whose completions the independent validator counts."""
    return Run(
        system=system,
        repeat=repeat,
        seconds=seconds,
        num_rows=len(done),
        num_output_tokens=sum(len(completion.token_ids) for completion in done),
        num_valid=count_valid(done, workload),
        load_average=os.getloadavg()[0],
    )


def count_valid(done: Sequence[Completion], workload: Workload) -> int:
    """Completions that the independent validator accepts; all of a workload without a schema."""
    if workload.schema is None:
        return len(done)
    validator = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, workload.schema))
    return sum(validator.check(completion.text)[1] is None for completion in done)


def model_directory(shape: str, tokenizer: Path | None) -> AbstractContextManager[Path]:
    """A directory with the shape's config.json and the tokenizer of another directory, or of the demo model."""
    return config_directory(SHAPES[shape], tokenizer)


@contextmanager
def config_directory(config: Mapping[str, Any], tokenizer: Path | None = None) -> Iterator[Path]:
    """The same for any config.json."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(config))
        if tokenizer is not None:
            for file in tokenizer.glob("tokenizer*.json"):
                (directory / file.name).write_bytes(file.read_bytes())
        else:
            from engine.text import Text
            from schemas.model_files import resolve_model

            Text(resolve_model("smollm2")).tokenizer.save_pretrained(directory)
        yield directory
