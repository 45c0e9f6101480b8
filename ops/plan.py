"""Predict what each topology of some GPUs takes and gives: ``python -m ops.plan --model DeepSeek-V3 --gpus 8``.

A GPU's measured speed on a workload is a share of its bound (ops.bench.roofline). The same share of each rank's bound,
and what travels between ranks, is the prediction. Starts no engine; ``--compare`` tells how far off it was.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from engine.models.spec import ModelSpec
from engine.topology import Topology
from ops.bench.measurement import RESULTS, write_result
from ops.bench.points import DECODE, DECODED_TOKENS, PROMPT_TOKENS
from ops.bench.roofline import BYTES, Costs, Rates, RowWork, decode_seconds, prefill_seconds
from ops.bench.workloads import SHAPES, free
from schemas.errors import InputDataError, NightmillError, SettingsError
from schemas.model_files import read_config

GIB = 2**30
DEGREES = ("data", "expert", "tensor", "context")
STEP_ROWS = 4096  # of a prefill step
CACHE_SHARE = 0.9  # of what weights leave; engine.device
CONTEXT_GIB = 1.0  # of CUDA and its libraries
FP8_SPEED = 1.8  # by bf16, dense products on an H200 (engine's kernels bench)
RATES = Rates(flops_per_s=7.9e14, bytes_per_s=4.27e12)  # of an H200; results bring their own


@dataclass(frozen=True)
class Link:
    """Between any two GPUs: bytes a second one way, what a collective call takes at least, and a vote by the hosts."""

    bytes_per_s: float = 320e9
    call_s: float = 25e-6
    vote_s: float = 230e-6

    def seconds(self, num_calls: float, num_bytes: float) -> float:
        """Of so many calls that bring each rank so many bytes in all."""
        return num_calls * self.call_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Work:
    """The rows of one measurement. ``has_decodes``: each output token is a step; a constraint forces most of them."""

    rows: tuple[RowWork, ...]
    has_decodes: bool

    @property
    def amount(self) -> int:
        """What its speed is stated in: rows, or output tokens where each is a step."""
        return sum(row.num_output for row in self.rows) if self.has_decodes else len(self.rows)


@dataclass(frozen=True)
class Measured:
    """One engine's seconds on one work."""

    shape: str
    work_name: str
    quantization: str
    topology: Topology
    work: Work
    seconds: float
    source: str


@dataclass(frozen=True)
class Memory:
    """Of one rank."""

    weight_bytes: float
    cache_bytes_per_token: float

    def cache_tokens(self, gpu_gib: float) -> int:
        """Tokens that its GPU has room for; 0 where not even the weights fit."""
        rest = (gpu_gib - CONTEXT_GIB) * GIB - self.weight_bytes
        return max(0, int(CACHE_SHARE * rest / self.cache_bytes_per_token))


def costs_of(config: Mapping[str, Any], quantization: str) -> Costs:
    """A model's work on one GPU."""
    costs = Costs.of(config)
    return replace(costs, parameter_bytes=1) if quantization == "fp8" else costs


def rates_of(rates: Rates, quantization: str) -> Rates:
    """Products in fp8 are faster."""
    return replace(rates, flops_per_s=FP8_SPEED * rates.flops_per_s) if quantization == "fp8" else rates


def rank_costs(costs: Costs, topology: Topology) -> Costs:
    """What a rank reads in a decode step, by the rows of its replica.

    A rank has E / e experts, and rows of all e ranks may pick them: that an expert is left out by a row of each is the
    e-th power of that it is left out by one, which is as if a row picked more of them.
    """
    tensor, expert, num = topology.tensor, topology.expert, costs.num_experts
    is_picked = num * (1 - (1 - costs.num_selected / num) ** expert)
    return replace(
        costs,
        body_parameters=costs.body_parameters / tensor,
        head_parameters=costs.head_parameters / tensor,
        attention_width=costs.attention_width / tensor,
        cache_bytes=costs.cache_bytes / tensor,
        window_width=costs.window_width / tensor,
        window_bytes=costs.window_bytes / tensor,
        expert_parameters=costs.expert_parameters / expert,
        num_selected=is_picked,
    )


def memory_of(config: Mapping[str, Any], costs: Costs, topology: Topology) -> Memory:
    """Weights and cache of a rank; the embedding is whole on each, and copies of experts take what experts take."""
    num_slots = costs.num_experts / topology.expert + topology.expert_copies
    layers = (costs.body_parameters / topology.tensor + costs.expert_parameters * num_slots) * costs.parameter_bytes
    is_tied = config.get("tie_word_embeddings", False)
    head = 0 if is_tied else costs.head_parameters / topology.tensor
    return Memory(layers + BYTES * (costs.head_parameters + head), costs.cache_bytes / topology.tensor)


def bound_seconds(costs: Costs, rates: Rates, topology: Topology, work: Work) -> float:
    """The least time of the busiest rank, without what travels: prefills are divided by all ranks."""
    seconds = prefill_seconds(costs, rates, work.rows) / topology.num_ranks
    if work.has_decodes:
        seconds += decode_seconds(rank_costs(costs, topology), rates, work.rows[:: topology.data])
    return seconds


def travel_seconds(config: Mapping[str, Any], topology: Topology, work: Work, link: Link) -> float:
    """What a rank's rows, and parts of them, take between ranks, and votes on steps; the engine hides none of it."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    tensor, expert, context = topology.tensor, topology.expert, topology.context
    own = sum(row.num_prompt - row.num_cached for row in work.rows) / topology.data
    decoded = sum(row.num_output for row in work.rows) / topology.data if work.has_decodes else 0
    num_decodes = max(row.num_output for row in work.rows) - 1 if work.has_decodes else 0
    num_steps = own / STEP_ROWS + num_decodes
    row_bytes = BYTES * hidden
    seconds = num_steps * link.vote_s if topology.shares_experts else 0.0
    if tensor > 1:  # two sums a layer, each a ring of 2 (t - 1) / t of the rows
        num_bytes = 2 * layers * (own + decoded) * row_bytes * 2 * (tensor - 1) / tensor
        seconds += link.seconds(2 * layers * num_steps, num_bytes)
    if expert > 1:  # a dispatch and a combine in each sparse layer: the rows of the others, there and back
        sparse = layers - config.get("first_k_dense_replace", 0)
        num_bytes = sparse * 2 * (own / context + decoded) * row_bytes * (expert - 1)
        seconds += link.seconds(2 * sparse * num_steps, num_bytes)
    if context > 1:  # each layer's keys and values of a prefill, from the others
        cached_bytes = Costs.of(config).cache_bytes
        seconds += link.seconds(layers * own / STEP_ROWS, own * cached_bytes * (context - 1) / context)
    return seconds


def predict_seconds(
    config: Mapping[str, Any], quantization: str, topology: Topology, work: Work, *, share: float, link: Link
) -> float:
    """``share``: of its bound that one GPU reaches on such work."""
    costs, rates = costs_of(config, quantization), rates_of(RATES, quantization)
    return bound_seconds(costs, rates, topology, work) / share + travel_seconds(config, topology, work, link)


def share_of_bound(measured: Measured) -> float:
    """What one GPU reached."""
    costs = costs_of(SHAPES[measured.shape], measured.quantization)
    rates = rates_of(RATES, measured.quantization)
    return bound_seconds(costs, rates, measured.topology, measured.work) / measured.seconds


def topologies(spec: ModelSpec, num_gpus: int) -> Iterator[Topology]:
    """All that use so many GPUs and that the model allows."""
    for tensor in range(1, num_gpus + 1):
        for context in range(1, num_gpus // tensor + 1):
            if num_gpus % (tensor * context):
                continue
            data = num_gpus // (tensor * context)
            for expert in range(1, data * context + 1):
                topology = Topology(data=data, expert=expert, tensor=tensor, context=context)
                try:
                    topology.check()
                    topology.check_model(spec)
                except SettingsError:
                    continue
                yield topology


def make_work(name: str, num_rows: int, *, num_prompt: float, num_cached: float, num_output: float) -> Work:
    """The rows of a workload by its name; constrained ones all as their mean, which prefills depend on alone."""
    if name == "free":
        workload = free()
        share = num_cached / num_prompt
        pairs = zip(workload.prompts, workload.max_tokens, strict=True)
        return Work(tuple(RowWork(len(p), int(share * len(p)), budget) for p, budget in pairs), has_decodes=True)
    row = RowWork(round(num_prompt / num_rows), round(num_cached / num_rows), round(num_output / num_rows))
    return Work((row,) * num_rows, has_decodes=False)


def read_measured(directory: Path) -> list[Measured]:
    """Every engine's result in the files of ops.bench."""
    found: list[Measured] = []
    for path in sorted(directory.glob("*.json")):
        document = json.loads(path.read_text())
        for point in [*document.get("points", []), *_labelling_points(path.name, document)]:
            if point["name"].startswith(("skewed", "drafts")):  # no uniform, plain decoding
                continue
            topology = Topology(**{name: point["engine"].get(f"{name}_parallel", 1) for name in DEGREES})
            for name, result in point["results"].items():
                work = _work_of(result, name, topology)
                facts = point["shape"], name, point["quantization"], topology, work, result["seconds"]
                found.append(Measured(*facts, path.stem))
    return found


def _labelling_points(file_name: str, document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of ops.bench labelling, written as those of ops.bench.points are."""
    config = document.get("config", {})
    for result in document.get("results", ()) if file_name.startswith("engine-") else ():
        if result.get("model") in SHAPES and "num_cached_tokens" in result:
            num_rows = document["runs"][0]["num_rows"]
            timed = result | {"num_rows": num_rows, "seconds": num_rows / result["rows_per_s"]}
            yield {
                "name": "labelling",
                "shape": result["model"],
                "quantization": config.get("quantization", "none"),
                "engine": config.get("engine", {}),
                "results": {result["workload"]: timed},
            }


def _work_of(result: Mapping[str, Any], name: str, topology: Topology) -> Work:
    if name.startswith(DECODE):
        rows = (RowWork(PROMPT_TOKENS, PROMPT_TOKENS - 1, DECODED_TOKENS),) * int(name.removeprefix(DECODE))
        return Work(rows * topology.data, has_decodes=True)
    num_output = result["output_tokens_per_s"] * result["seconds"]
    counts = {"num_prompt": result["num_prompt_tokens"], "num_cached": result["num_cached_tokens"]}
    return make_work(name, result["num_rows"], num_output=num_output, **counts)


@dataclass(frozen=True)
class Basis:
    """What one GPU did: on which work, and the share of its bound that it reached."""

    work: Work
    share: float
    source: str


def find_basis(measured: Sequence[Measured], shape: str, work_name: str, quantization: str) -> Basis | None:
    """Of that shape, else the median share of others; None if no GPU did the work alone."""
    alone = [each for each in measured if each.topology.num_ranks == 1 and each.work_name == work_name]
    same = [each for each in alone if (each.shape, each.quantization) == (shape, quantization)]
    if same:
        return Basis(same[-1].work, share_of_bound(same[-1]), same[-1].source)
    if alone:
        return Basis(alone[-1].work, statistics.median(map(share_of_bound, alone)), "median of other shapes")
    return None


def compare(measured: Sequence[Measured], link: Link) -> list[dict[str, Any]]:
    """Prediction and measurement of every engine of several GPUs whose shape and work one GPU did in the same file."""
    table = []
    for each in measured:
        beside = [other for other in measured if (other.source, other.shape) == (each.source, each.shape)]
        basis = find_basis(beside, each.shape, each.work_name, each.quantization)
        if each.topology.num_ranks == 1 or basis is None:
            continue
        config, numbers = SHAPES[each.shape], each.quantization
        seconds = predict_seconds(config, numbers, each.topology, each.work, share=basis.share, link=link)
        table.append(
            {
                "shape": each.shape,
                "work": each.work_name,
                "topology": describe(each.topology),
                "measured_s": round(each.seconds, 2),
                "predicted_s": round(seconds, 2),
                "error": round(seconds / each.seconds - 1, 3),
            }
        )
    return table


def find_link(directory: Path) -> Link:
    """As measured between GPUs by ops.bench ranks or scale; else an H200's."""
    for name in ("scale", "ranks"):
        path = directory / f"{name}.json"
        entries = json.loads(path.read_text()).get("exchange", []) if path.is_file() else []
        for entry in entries:
            if entry.get("times"):
                fewest = min(entry["times"], key=lambda each: (each["rows"], each["us"]))
                return Link(entry["link_bytes_per_s"], fewest["us"] / 2e6, entry["vote_us"] / 1e6)
    return Link()


def describe(topology: Topology) -> str:
    """Degrees above 1."""
    degrees = [("data", topology.data), ("experts", topology.expert), ("tensor", topology.tensor)]
    degrees.append(("context", topology.context))
    return " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one rank"


@dataclass(frozen=True)
class Outlook:
    """What is predicted of one topology: speeds by work, rows a second, or tokens where each is a step."""

    topology: Topology
    memory: Memory
    speeds: dict[str, float]


def plan(
    config: Mapping[str, Any], quantization: str, num_gpus: int, *, bases: Mapping[str, Basis], link: Link
) -> list[Outlook]:
    """All topologies of so many GPUs, by what one GPU did on each work."""
    costs = costs_of(config, quantization)
    outlooks = []
    for topology in topologies(ModelSpec.from_config(config), num_gpus):
        speeds = {}
        for name, basis in bases.items():
            work = basis.work
            if name.startswith(DECODE):  # so many rows a replica
                work = replace(work, rows=work.rows * topology.data)
            seconds = predict_seconds(config, quantization, topology, work, share=basis.share, link=link)
            speeds[name] = work.amount / seconds
        outlooks.append(Outlook(topology, memory_of(config, costs, topology), speeds))
    return outlooks


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--model", default="DeepSeek-V2-Lite", show_default=True, help="A shape of ops.bench, or a directory.")
@click.option("--gpus", "num_gpus", default=2, show_default=True, type=click.IntRange(1, 64))
@click.option("--quantization", type=click.Choice(["none", "fp8"]), default="none", show_default=True)
@click.option("--memory-gib", default=139.0, show_default=True, help="Of a GPU: an H200's.")
@click.option(
    "--compare", "is_comparison", is_flag=True, help="Predictions beside all that several GPUs have measured."
)
def main(*, is_comparison: bool, **options: Any) -> None:
    """Predict memory and speed of every topology from one GPU's measured speeds and the links between GPUs."""
    measured, link = read_measured(RESULTS), find_link(RESULTS)
    for line in comparison(measured, link) if is_comparison else outlook(measured, link, **options):
        click.echo(line)


def comparison(measured: Sequence[Measured], link: Link) -> Iterator[str]:
    """Write ``results/plan.json`` and yield the lines to print."""
    table = compare(measured, link)
    write_result("plan", asdict(link), [], predictions=table)
    yield f"{'shape':<20}{'work':<12}{'topology':<24}{'measured':>10}{'predicted':>11}{'error':>8}"
    for each in table:
        yield (
            f"{each['shape']:<20}{each['work']:<12}{each['topology']:<24}{each['measured_s']:>8.2f} s"
            f"{each['predicted_s']:>9.2f} s{each['error']:>+8.0%}"
        )
    if not table:
        yield "nothing to compare: run python -m ops.bench ranks on two GPUs"


def outlook(
    measured: Sequence[Measured], link: Link, *, model: str, num_gpus: int, quantization: str, memory_gib: float
) -> Iterator[str]:
    """Yield a line for each topology, those that fit first, the fastest first. Raises InputDataError, ModelError."""
    config = SHAPES[model] if model in SHAPES else _read_directory(Path(model))
    names = sorted({each.work_name for each in measured})
    found = {name: find_basis(measured, model, name, quantization) for name in names}
    bases = {name: basis for name, basis in found.items() if basis}

    def rank(each: Outlook) -> tuple[float, ...]:
        return (-bool(each.memory.cache_tokens(memory_gib)), *(-speed for speed in each.speeds.values()))

    yield f"{'topology':<34}{'weights':>12}{'cache':>16}" + "".join(f"{name:>14}" for name in bases)
    for each in sorted(plan(config, quantization, num_gpus, bases=bases, link=link), key=rank):
        tokens = each.memory.cache_tokens(memory_gib)
        room = f"{tokens / 1e3:,.0f}k tokens" if tokens else "does not fit"
        speeds = "".join(f"{speed:>14,.0f}" for speed in each.speeds.values())
        yield f"{describe(each.topology):<34}{each.memory.weight_bytes / GIB:>8.1f} GiB{room:>16}{speeds}"
    for name, basis in bases.items():
        unit = "output tokens/s" if basis.work.has_decodes else "rows/s"
        yield f"{name}: {unit}; one GPU reaches {basis.share:.0%} of its bound ({basis.source})"


def _read_directory(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        raise InputDataError(f"{path} holds no config.json and is none of {', '.join(SHAPES)}")
    return read_config(path)


if __name__ == "__main__":
    try:
        main()
    except NightmillError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
