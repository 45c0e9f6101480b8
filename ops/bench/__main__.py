"""The command line of the benchmarks: `python -m ops.bench engine --cpu`. Knows no measurement."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

import click

from ops.bench.tickets import DEFAULT_DATA
from ops.bench.workloads import DEFAULT_QUESTIONS, FORECAST_JOBS, SHAPES, WORKLOADS
from schemas.errors import NightmillError
from schemas.log import configure_logging
from schemas.settings import Settings

PEERS = ("transformers", "openvino")

# Of several benchmarks:
shape_option = click.option("--shape", type=click.Choice(list(SHAPES)), default="Qwen3-0.6B", show_default=True)
questions_option = click.option(
    "--questions", default=DEFAULT_QUESTIONS, type=click.Path(path_type=Path), help="banking77.parquet."
)
tokenizer_option = click.option(
    "--tokenizer", type=click.Path(path_type=Path, exists=True), help="Default: the demo model's."
)
settings_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="An engine setting, as JSON."
)
commit_option = click.option("--commit", help="Recorded with the result where this machine has no checkout.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Measure this machine. Results also go to ops/bench/results/ as JSON."""


@main.command()
@click.option("--cpu", is_flag=True, help="Run both systems on the CPU even where there is a GPU.")
@click.option(
    "--workload", "workloads", type=click.Choice(["a", "b"]), multiple=True, default=("a",), show_default=True,
    help="a: route and reason; b: route.",
)  # fmt: skip
@click.option("--rows", "num_rows", default=64, show_default=True, type=click.IntRange(min=1), help="Rows of a run.")
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Runs of each system, in turns."
)
@click.option("--model", default="smollm2", show_default=True, help="The workload's token ids fit the demo model.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
@click.option(
    "--batch", "batch_rows", default=32, show_default=True, type=click.IntRange(min=1), help="Rows of a static batch."
)
@click.option(
    "--peer", "peers", multiple=True, metavar="NAME[=PYTHON]", default=("transformers",), show_default=True,
    help="transformers; openvino with a Python that has openvino-genai and optimum-intel.",
)  # fmt: skip
@click.option("--no-peer", is_flag=True, help="Measure our engine only.")
@click.option(
    "--data",
    default=DEFAULT_DATA,
    type=click.Path(path_type=Path),
    help="Directory of prompts.jsonl and schema_*.json.",
)
def engine(
    cpu: bool, no_peer: bool, workloads: tuple[Literal["a", "b"], ...], peers: tuple[str, ...], **options: Any
) -> None:
    """Our engine beside its peers, in turns on the same rows."""
    from ops.bench.engine import EngineBench, run_engine_bench

    device = "cpu" if cpu or not _has_cuda() else "cuda"
    pythons = {} if no_peer else _pythons(peers)
    for workload in workloads:
        bench = EngineBench(device=device, workload=workload, peers=pythons, **options)
        for line in run_engine_bench(bench, _settings()):
            click.echo(line)


@main.command()
@click.option("--rows", "num_rows", default=100_000, show_default=True, type=click.IntRange(min=1))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
def jobs(num_rows: int, repeats: int) -> None:
    """The data path without a model: what a row costs beside its generation, on one thread."""
    from ops.bench.data_path import DataPathBench, run_data_path_bench

    _settings()
    for line in run_data_path_bench(DataPathBench(num_rows, repeats)):
        click.echo(line)


@main.command()
@click.option("--rows", "num_rows", default=200, show_default=True, type=click.IntRange(1, 360), help="Sample tickets.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1), help="Nights after the first.")
@click.option("--model", default="smollm2", show_default=True)
def nightly(**options: Any) -> None:
    """The same rows on a first night and on the next ones, as whole submits with the worker that they need or not."""
    from ops.bench.nightly import NightlyBench, run_nightly_bench

    _settings()
    for line in run_nightly_bench(NightlyBench(**options)):
        click.echo(line)


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--json", "output", type=click.Path(path_type=Path, dir_okay=False), help="Also write the figures here.")
@click.option("--tokenizer", default="smollm2", show_default=True, help="Model whose vocabulary is used.")
@click.option("--no-peers", is_flag=True, help="Measure our grammars only.")
def constraints(path: Path, output: Path | None, tokenizer: str, no_peers: bool) -> None:
    """Real schemas and documents known to be valid or invalid, one {id, schema, tests} a line in PATH."""
    from ops.bench.constraints import ConstraintsBench, run_constraints_bench

    figures, lines = run_constraints_bench(ConstraintsBench(path, tokenizer, has_peers=not no_peers))
    for line in lines:
        click.echo(line)
    if output:
        output.write_text(json.dumps(figures, indent=1) + "\n")


@main.command()
@click.option(
    "--rows", "num_rows", default=256, show_default=True, type=click.IntRange(min=1), help="Rows of the batch."
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--model", default="smollm2", show_default=True)
@click.option("--device", default="cpu", show_default=True)
def masks(**options: Any) -> None:
    """A full batch of one schema against free rows of the same lengths, and what the masks of a step take."""
    from ops.bench.masks import MasksBench, run_masks_bench

    _settings()
    for line in run_masks_bench(MasksBench(**options)):
        click.echo(line)


@main.command()
@shape_option
@click.option("--workload", "workloads", type=click.Choice(WORKLOADS), multiple=True, default=WORKLOADS)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--quantization", type=click.Choice(["none", "fp8"]), default="none", show_default=True)
@questions_option
@tokenizer_option
@settings_option
@commit_option
def labelling(settings: tuple[str, ...], commit: str | None, **options: Any) -> None:
    """Our engine on free, route, extract and extract's prefill, over a model shape with random weights."""
    from ops.bench.labelling import LabellingBench, run_labelling_bench

    configure_logging("WARNING")
    bench = LabellingBench(engine=_engine_fields(settings), **options)
    for line in run_labelling_bench(bench, commit):
        click.echo(line)


@main.command()
@shape_option
@click.option("--workload", "workloads", type=click.Choice(WORKLOADS), multiple=True, default=("free", "extract"))
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(min=1))
@questions_option
@tokenizer_option
@settings_option
@commit_option
def deterministic(settings: tuple[str, ...], commit: str | None, **options: Any) -> None:
    """What --deterministic costs, and whether answers then still depend on their batch."""
    from ops.bench.deterministic import DeterministicBench, run_deterministic_bench

    configure_logging("WARNING")
    bench = DeterministicBench(engine=_engine_fields(settings), **options)
    for line in run_deterministic_bench(bench, commit):
        click.echo(line)


@main.command()
@questions_option
@tokenizer_option
@click.option("--limit", "limit_s", default=460.0, show_default=True, help="Seconds; what does not fit is left out.")
@commit_option
def ranks(commit: str | None, **options: Any) -> None:
    """Two GPUs against one: exchange of rows, engines, equal tokens. Written after each part."""
    from ops.bench.ranks import RanksBench, run_ranks_bench

    configure_logging("WARNING")
    for line in run_ranks_bench(RanksBench(**options), commit):
        click.echo(line)


@main.command()
@click.option("--cpu", "is_cpu", is_flag=True, help="A tiny shape on CPU ranks, to try the command.")
@click.option(
    "--ranks", "counts", multiple=True, type=click.IntRange(min=1), help="Default: 1, 2, 4, 8, as GPUs allow."
)
@click.option("--mtp", "drafts", multiple=True, metavar="NAME=VALUE", help="Engine settings that draft, as JSON.")
@questions_option
@tokenizer_option
@click.option("--limit", "limit_s", default=580.0, show_default=True, help="Seconds; what does not fit is left out.")
@commit_option
def scale(drafts: tuple[str, ...], commit: str | None, **options: Any) -> None:
    """A slice of DeepSeek-V3 in fp8 on 1, 2, 4, 8 GPUs: exchange, speed, expert balance. Written after each part."""
    from ops.bench.scale import ScaleBench, run_scale_bench

    configure_logging("WARNING")
    for line in run_scale_bench(ScaleBench(mtp=_engine_fields(drafts), **options), commit):
        click.echo(line)


@main.command()
@click.option("--rows", "num_rows", default=320, show_default=True, type=click.IntRange(min=1), help="Rows of a job.")
@click.option("--sample", "num_rehearsed", default=96, show_default=True, type=click.IntRange(min=1))
@click.option("--model", default="smollm2", show_default=True)
@click.option("--job", "jobs", type=click.Choice(FORECAST_JOBS), multiple=True, default=FORECAST_JOBS)
def forecast(**options: Any) -> None:
    """How far the dry run's forecast is from the time that three jobs then take."""
    from ops.bench.forecast import ForecastBench, run_forecast_bench

    for line in run_forecast_bench(ForecastBench(**options), _settings()):
        click.echo(line)


@main.command()
@click.option(
    "--rows", "sizes", default=(10_000, 100_000), show_default=True, multiple=True, type=click.IntRange(min=1)
)
def pipeline(sizes: tuple[int, ...]) -> None:
    """Parquet to Parquet through Celery with a tiny model: rows a second and memory at different sizes."""
    from ops.bench.pipeline import PipelineBench, run_pipeline_bench

    for line in run_pipeline_bench(PipelineBench(sizes), _settings()):
        click.echo(line)


@main.command()
@shape_option
@questions_option
@tokenizer_option
@commit_option
def steps(shape: str, questions: Path, tokenizer: Path | None, commit: str | None) -> None:
    """What our engine's steps compute on route, and how busy they keep a GPU on free."""
    from ops.bench.steps import run_steps_bench

    configure_logging("WARNING")
    for line in run_steps_bench(shape, questions, tokenizer, commit):
        click.echo(line)


@main.command()
@commit_option
def kernels(commit: str | None) -> None:
    """Each kernel backend at DeepSeek's sizes: against the GPU's limit, and against the reference's result."""
    from ops.bench.kernels import run_kernels_bench

    for line in run_kernels_bench(commit):
        click.echo(line)


@main.command("gpu-tests")
@commit_option
@click.option("--processes", default=1, show_default=True, type=click.IntRange(min=1), help="Of pytest-xdist.")
def gpu_tests(commit: str | None, processes: int) -> None:
    """All tests that need a GPU, and those of the kernels; exit code 1 if one fails."""
    from ops.bench.gpu_tests import run_gpu_tests

    outcome, lines = run_gpu_tests(processes, commit)
    for line in lines:
        click.echo(line)
    sys.exit(1 if outcome.failed else 0)


@main.command()
def table() -> None:
    """Put the engine's speeds from the result files into README, beside a peer's, and draw them."""
    from ops.bench.table import write_table

    for line in write_table():
        click.echo(line)


def _pythons(peers: tuple[str, ...]) -> dict[str, Path | None]:
    """NAME or NAME=PYTHON by name."""
    pythons = {name: Path(python) if python else None for name, _, python in (peer.partition("=") for peer in peers)}
    if unknown := pythons.keys() - {*PEERS}:
        raise click.BadParameter(f"unknown peer {', '.join(sorted(unknown))}: known are {', '.join(PEERS)}")
    return pythons


def _engine_fields(settings: tuple[str, ...]) -> dict[str, Any]:
    """NAME=VALUE by name, VALUE read as JSON. Raises click.BadParameter."""
    fields = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            fields[name] = json.loads(value)
        except ValueError as error:
            raise click.BadParameter(
                f"{setting!r} is not NAME=VALUE with a JSON value: quote text, as in '\"cpu\"'"
            ) from error
    return fields


def _settings() -> Settings:
    settings = Settings.load()
    configure_logging("WARNING", settings.log.format)
    return settings


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except NightmillError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
