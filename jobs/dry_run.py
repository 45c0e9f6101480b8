"""``--dry-run``: what a submit would do and what that would take, as text or JSON. Decides nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from jobs.api import Prepared
from jobs.cli import echo_json
from jobs.forecast import Forecast, forecast, sample_rows
from jobs.progress import format_bytes, format_duration, make_reporter
from jobs.show import count_workers, describe_prompt, describe_service, print_facts
from jobs.store import absolute_location
from schemas.errors import BrokerError
from schemas.settings import JobsSettings, Settings


def run_dry(prepared: Prepared, settings: Settings, *, num_rehearsed: int | None, as_json: bool) -> None:
    """Forecast the job and print it; with ``num_rehearsed``, that many rows are run first, to measure."""
    sample = sample_rows(prepared, settings)  # before the rehearsal: afterwards the ledger knows its rows
    rate = None
    if num_rehearsed is not None:
        from jobs.rehearsal import rehearse

        rate = rehearse(prepared, settings, num_rehearsed, make_reporter(as_json=as_json, num_rows=num_rehearsed))
    try:
        num_workers = count_workers(settings, prepared.spec.model) or 0
    except BrokerError:
        num_workers = 0  # said beside it
    plan = forecast(prepared, settings, sample, num_workers=num_workers, rate=rate)
    show_dry_run(prepared, plan, settings, as_json=as_json)


def show_dry_run(prepared: Prepared, plan: Forecast, settings: Settings, *, as_json: bool) -> None:
    """Print a plan."""
    spec = prepared.spec
    facts: dict[str, Any] = {
        "job_id": spec.job_id,
        "files": len(spec.inputs),
        "rows": prepared.num_rows,
        "chunks": len(prepared.plan.chunks),
        "model": f"{spec.model.name} ({spec.model.dtype}, digest {spec.model.digest})",
        "output": absolute_location(prepared.output)
        if prepared.output
        else f"{settings.jobs_root.rstrip('/')}/{spec.job_id}/output",
        "label": f"{spec.output_column}: {prepared.label_type}",
        "workers": describe_service(settings, spec.model),
        **forecast_facts(plan, settings.jobs),
    }
    if as_json:
        decisions = [{"path": d.path, "decision": d.decision, "reason": d.reason} for d in prepared.decisions]
        prompt = describe_prompt(prepared.example)
        echo_json({"event": "dry_run", **facts, "constraint": decisions, "prompt": prompt, "forecast": asdict(plan)})
        return
    print_facts(facts)
    if plan.sample.prompt_tokens:
        _print_block("prompt tokens of the sampled rows", draw_histogram(plan.sample.prompt_tokens))
    if prepared.decisions:
        _print_block("constraint", [f"{d.decision:<9} {d.path}  {d.reason}" for d in prepared.decisions])
    _print_block("first prompt", describe_prompt(prepared.example).splitlines())
    is_rehearsed = plan.rate is not None and plan.rate.num_answered > 0
    click.echo("\nno job was made; the sample's answers are kept for it" if is_rehearsed else "\nnothing was written")


def _print_block(title: str, lines: Sequence[str]) -> None:
    click.echo(f"\n{title}")
    for line in lines:
        click.echo(f"  {line}")


def forecast_facts(plan: Forecast, settings: JobsSettings) -> dict[str, str]:
    """A forecast in words; what is not known says how to know it."""
    sample, rate = plan.sample, plan.rate
    facts = {
        "asked": f"about {plan.num_asked:,} of {plan.num_rows:,} rows"
        + "".join(f", {number / sample.num_rows:.0%} {status}" for status, number in sample.statuses.most_common())
        + (f", {sample.num_repeated / sample.num_rows:.0%} ask the same as another" if sample.num_repeated else "")
        + (f", {sample.num_known / sample.num_rows:.0%} are known from earlier jobs" if sample.num_known else "")
        + (f" (from {sample.num_rows:,} of them)" if sample.num_rows < plan.num_rows else "")
    }
    if tokens := sample.prompt_tokens:
        total = plan.num_asked * sum(tokens) / len(tokens)
        facts["prompt tokens"] = (
            f"about {total:,.0f}: {sum(tokens) / len(tokens):.0f} a row, {tokens[-1]:,} at most; "
            f"all begin with the same {sample.prefix_tokens:,}"
        )
    elif sample.problem:
        facts["prompt tokens"] = f"not known: {sample.problem}"
    mean = f"about {rate.output_tokens:.1f} a row in {rate.source}, " if rate else ""
    facts["output tokens"] = f"{mean}{plan.max_output_tokens:,} at most"
    if not plan.num_asked:
        facts["time"] = "seconds: nothing is asked"
    elif rate is None or plan.eta_s is None or plan.low_s is None or plan.high_s is None:
        facts["time"] = "not known: no job of this model has run here; measure with --sample 256"
    else:
        interval = f"{format_duration(plan.low_s)} to {format_duration(plan.high_s)}"
        workers = f"{max(1, plan.num_workers)} worker{'s' if plan.num_workers > 1 else ''}"
        facts["time"] = (
            f"about {format_duration(plan.eta_s)}, likely {interval}, with {workers} on {rate.hardware} "
            f"(rate from {rate.source})"
        )
    if plan.device_hours is not None and rate is not None:
        low, high = plan.device_hours / (1 + rate.spread), plan.device_hours * (1 + rate.spread)
        price = f": {plan.device_hours * settings.gpu_hour_price:,.2f} {settings.currency}"
        hours = f"{plan.device_hours:,.3f}, likely {low:,.3f} to {high:,.3f}"
        facts["device-hours"] = hours + (price if settings.gpu_hour_price else "")
    free = f" of {format_bytes(plan.free_bytes)} that are free" if plan.free_bytes is not None else ""
    facts["disk"] = f"about {format_bytes(plan.disk_bytes)}{free}"
    return facts


def draw_histogram(values: Sequence[int], num_bins: int = 8, width: int = 40) -> list[str]:
    """A histogram as lines of text: from, to, a bar and how many; ``values`` are sorted."""
    step = max(1, -(-(values[-1] - values[0] + 1) // num_bins))
    counts = Counter((value - values[0]) // step for value in values)
    lines = []
    for index in range(max(counts) + 1):
        low = values[0] + index * step
        bar = "█" * round(width * counts[index] / max(counts.values()))
        lines.append(f"{low:>6,} to {low + step - 1:>6,}  {bar} {counts[index]}")
    return lines
