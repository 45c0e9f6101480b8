"""How far the dry run's forecast is from the time that the job then takes: three jobs, on this machine, embedded mode.

Each is rehearsed, forecast, and run anew on rows that nothing knows yet. Knows no engine.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import api
from jobs.broker import stop_broker
from jobs.forecast import forecast, sample_rows
from jobs.rehearsal import rehearse
from ops.bench.measurement import Run, write_result
from ops.bench.workloads import FORECAST_JOBS
from schemas.constraints import load_constraint
from schemas.records import ConstraintKind, RowStatus, Sampling
from schemas.settings import Settings

DEMO = Path(__file__).parents[1] / "demo"
SCHEMA = Path(__file__).parents[2] / "schemas" / "route.json"
ROUTES = '["billing", "bug", "other", "account"]'


@dataclass(frozen=True)
class ForecastBench:
    """``num_rows`` distinct rows a job, of which as many as ``num_rehearsed`` are run first.

    Fewer jobs than ``FORECAST_JOBS`` are a trial, whose figures are written to a file of their own.
    """

    num_rows: int = 320
    num_rehearsed: int = 96
    model: str = "smollm2"
    jobs: tuple[str, ...] = FORECAST_JOBS


def run_forecast_bench(bench: ForecastBench, settings: Settings) -> Iterator[str]:
    """Yield a line a job and write the JSON; everything lies in a temporary state directory."""
    runs, forecasts = [], []
    with TemporaryDirectory() as directory:
        state_dir = Path(directory) / "state"
        settings = settings.model_copy(update={"state_dir": state_dir, "jobs_root": str(state_dir / "jobs")})
        data = _write_rows(Path(directory), bench.num_rows)
        try:
            for name in bench.jobs:
                fields = _jobs()[name]
                submission = api.Submission(inputs=(data,), name=name, model=bench.model, refresh=True, **fields)
                run, found = _compare(name, api.prepare(submission, settings), bench, settings)
                runs.append(run)
                forecasts.append(found)
                yield (
                    f"{name}: forecast {found['eta_s']:.0f} s ({found['low_s']:.0f} to {found['high_s']:.0f}), "
                    f"took {run.seconds:.0f} s, off by {found['error']:+.0%}"
                )
        finally:
            stop_broker(settings)
    config = asdict(bench) | {"engine": settings.engine.model_dump(mode="json")}
    name = "forecast" if bench.jobs == FORECAST_JOBS else f"forecast-{'-'.join(bench.jobs)}"
    yield f"wrote {write_result(name, config, runs, forecasts=forecasts)}"


def _compare(name: str, prepared: api.Prepared, bench: ForecastBench, settings: Settings) -> tuple[Run, dict[str, Any]]:
    sample = sample_rows(prepared, settings)
    started = time.monotonic()
    rate = rehearse(prepared, settings, bench.num_rehearsed)
    rehearsal_s = time.monotonic() - started
    plan = forecast(prepared, settings, sample, num_workers=0, rate=rate)
    started = time.monotonic()
    job = api.submit(prepared, settings)
    api.wait(job, settings)
    seconds = time.monotonic() - started
    success = job.success()
    assert success is not None
    assert success.throughput is not None
    assert plan.eta_s is not None
    run = Run(
        system=name,
        repeat=0,
        seconds=seconds,
        num_rows=success.throughput.num_asked,
        num_output_tokens=success.throughput.num_output_tokens,
        num_valid=success.counts.get(RowStatus.OK, 0),
        load_average=os.getloadavg()[0],
    )
    found = asdict(replace(plan, sample=replace(sample, prompt_tokens=None)))
    return run, found | {"error": plan.eta_s / seconds - 1, "rehearsal_s": rehearsal_s, "job": name}


def _write_rows(directory: Path, num_rows: int) -> str:
    """The demo's tickets, over and over, each with a number of its own so that none asks what another asks."""
    tickets = pq.read_table(DEMO / "tickets.parquet", columns=["subject", "text"]).to_pylist()
    rows = [{"id": number, **tickets[number % len(tickets)]} for number in range(num_rows)]
    path = directory / "tickets.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def _jobs() -> dict[str, dict[str, Any]]:
    """Short answers, longer ones, and free text after prompts of different lengths."""
    examples = (DEMO / "prompt.txt").read_text().replace("{{ subject }}", "{{ subject }} ({{ id }})")
    return {
        "choice": {
            "prompt_template": examples,
            "chat": False,
            "constraint": load_constraint(ConstraintKind.CHOICE, ROUTES),
        },
        "schema": {
            "prompt_template": examples,
            "chat": False,
            "constraint": load_constraint(ConstraintKind.JSON_SCHEMA, SCHEMA.read_text()),
        },
        "free": {"prompt_template": "Summarise ticket {{ id }}: {{ text }}", "sampling": Sampling(max_tokens=24)},
    }
