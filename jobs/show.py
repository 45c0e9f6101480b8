"""Text and JSON about jobs, for the verbs: the dry run, the summary at the end, one job, many jobs. Decides nothing."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import pyarrow as pa

from jobs.agreement import Agreement, measure_agreement
from jobs.arrow_types import output_names
from jobs.broker import broker_status, broker_url
from jobs.cli import echo_json
from jobs.job import REPORT_FILE, Job, Success
from jobs.local_worker import worker_command
from jobs.outputs import output_store
from jobs.progress import format_duration, plain_counts
from jobs.prompts import Prompt, PromptBuilder, Refusal
from jobs.queue import Progress, Queue
from jobs.source import python_rows
from jobs.store import exists, open_input
from schemas.errors import BrokerError, NightmillError
from schemas.plan import Decision
from schemas.records import JobState, ModelRef, RowStatus
from schemas.settings import Settings

if TYPE_CHECKING:
    from jobs.api import Prepared

NUM_SHOWN_ROWS = 5
MAX_SHOWN_COLUMNS = 3
MAX_CELL_CHARS = 60
COLUMN_GAP = 2
MIN_COLUMN_WIDTH = 6
PLAIN_WIDTH = 200  # of tables that go to a file or a pipe


def show_checked_keywords(prepared: "Prepared", *, as_json: bool) -> None:
    """Say which keywords of the constraint the decoder does not keep, and whether the first rows have prompts."""
    meanings = {Decision.CHECKED: "checked after decoding, not enforced", Decision.IGNORED: "ignored"}
    notes = [f"{d.path} is {meanings[d.decision]}: {d.reason}" for d in prepared.decisions if d.decision in meanings]
    if isinstance(prepared.example, Refusal):
        notes.append(f"the first rows have no prompt: {prepared.example.error or prepared.example.status}")
    if prepared.num_rows == 0:
        notes.append("the input has no rows")
    for text in notes:
        if as_json:
            echo_json({"event": "note", "text": text})
        else:
            click.echo(f"note: {text}", err=True)


def show_queued(job: Job, settings: Settings, *, as_json: bool) -> None:
    """Say that a job is queued, and who will work on it."""
    workers = describe_service(settings, job.spec.model)
    if as_json:
        echo_json({"event": "queued", "job_id": job.job_id, "rows": job.num_rows, "workers": workers})
        return
    num_chunks = f"{len(job.chunks):,} chunk{'s' if len(job.chunks) != 1 else ''}"
    click.echo(f"queued {job.job_id}: {job.num_rows:,} rows in {num_chunks}\n{workers}")
    click.echo(f"look: python -m jobs.status {job.job_id}")


def show_summary(job: Job, state: JobState, *, as_json: bool) -> None:
    """Print how a job ended: first rows, counts, agreement with gold, where the output is."""
    success = job.success()
    if success is None:
        if as_json:
            echo_json({"event": "summary", **describe_job(job)})
        else:
            cause = f"cause: {failure.cause}\n" if (failure := job.failure()) else ""
            click.echo(f"{cause}{job.job_id} is {state}; go on: python -m jobs.resume {job.job_id}")
        return
    agreement, problem = _try_agreement(job)
    if as_json:
        fields = None if agreement is None else {**vars(agreement), "share": agreement.share}
        echo_json({"event": "summary", **describe_job(job), "agreement": fields, "agreement_problem": problem})
        return
    _print_first_rows(job, success)
    click.echo(f"{job.job_id}: {state} · {format_counts(success.counts) or 'no rows'}")
    if success.num_copied:
        click.echo(
            f"copied: {success.num_copied:,} rows that ask the same as others, or as earlier jobs' (--refresh: not)"
        )
    if success.commonest_error and state is not JobState.DONE:
        click.echo(f"commonest cause: {success.commonest_error}")
    if job.spec.gold_column is not None:
        click.echo(f"agreement with {job.spec.gold_column}: {problem or _describe_agreement(agreement)}")
    click.echo(f"output: {locate_output(job)}")
    if exists(job.store, REPORT_FILE):
        click.echo(f"report: {job.store.locate(REPORT_FILE)}")


def describe_job(job: Job, settings: Settings | None = None) -> dict[str, Any]:
    """One job as JSON fields, from its files; with ``settings``, what the broker knows too if it answers."""
    success, committed, parked = job.success(), job.committed(), job.parked() - job.parts()
    fields: dict[str, Any] = {
        "job_id": job.job_id,
        "state": job.state(),
        "created": job.created,
        "finished": None if success is None else success.finished,
        "model": job.spec.model.name,
        "num_rows": job.num_rows,
        "counts": plain_counts(job.counts()),
        "num_copied": job.num_copied(),
        "num_chunks": len(job.chunks),
        "num_committed": len(committed),
        "num_parked": len(parked),
        "output": locate_output(job),
        "outputs": [] if success is None else [file.uri for file in success.outputs],
        "commonest_error": None if success is None else success.commonest_error,
        "failure": None if success is not None or (failure := job.failure()) is None else failure.cause,
    }
    if settings is not None and success is None:
        progress = _read_progress(job, settings)
        fields["running"] = plain_counts(progress.counts)
        fields["num_running"] = progress.num_chunks
        fields["workers"] = describe_service(settings, job.spec.model)
    return fields


def job_facts(fields: Mapping[str, Any], rows_per_s: float | None = None) -> dict[str, Any]:
    """What ``describe_job`` found, for people; ``rows_per_s`` if the caller has measured it."""
    num_done = sum(fields["counts"].values())
    num_left = fields["num_rows"] - num_done - sum(fields.get("running", {}).values())
    resume = f"python -m jobs.resume {fields['job_id']} --parked"
    return {
        "job": fields["job_id"],
        "state": fields["state"],
        "created": fields["created"],
        "finished": fields["finished"],
        "model": fields["model"],
        "rows": f"{num_done:,} of {fields['num_rows']:,} committed",
        "speed": f"{rows_per_s:,.1f} rows/s, {format_duration(num_left / rows_per_s)} left" if rows_per_s else "",
        "counts": format_counts(fields["counts"]),
        "copied": fields["num_copied"] or "",
        "running": format_counts(fields.get("running", {})),
        "chunks": f"{fields['num_committed']:,} of {fields['num_chunks']:,} done"
        + (f", {fields['num_running']:,} running" if fields.get("num_running") else ""),
        "parked": f"{fields['num_parked']} ({resume})" if fields["num_parked"] else "",
        "cause": fields["failure"] or fields["commonest_error"],
        "output": fields["output"] if fields["outputs"] else "",
        "workers": fields.get("workers", ""),
    }


def count_workers(settings: Settings, model: ModelRef) -> int | None:
    """How many workers serve the model's queue; None if no embedded broker runs. Starts nothing. Raises BrokerError."""
    status = None if settings.broker_url else broker_status(settings)
    if status is not None and status.pid is None:
        return None
    return Queue(settings, broker_url(settings)).workers_serving(model.queue)


def describe_service(settings: Settings, model: ModelRef) -> str:
    """Who serves the model's queue, and what to start if nobody does. Starts nothing, raises nothing."""
    try:
        number = count_workers(settings, model)
    except BrokerError as error:
        return str(error)
    if number is None:
        return "embedded: broker and worker are started by a waiting submit or resume"
    if number:
        return f"{number} serving {model.queue}"
    hint = (
        "start a worker with" if settings.broker_url else "a waiting submit or resume starts a worker, or you do with"
    )
    return f"nobody serves {model.queue}: {hint}\n  {worker_command(settings, model)}"


def describe_prompt(example: Prompt | Refusal | None) -> str:
    """A prompt as text."""
    if example is None:
        return "(no rows)"
    if isinstance(example, Refusal):
        return f"({example.status}: {example.error or 'cut by --where'})"
    if example.messages is None:
        return example.text or ""
    return "\n".join(f"[{message.role}] {message.content}" for message in example.messages)


def locate_output(job: Job) -> str:
    """Where the job's final files are or will be."""
    store, prefix = output_store(job)
    return store.locate(prefix.rstrip("/"))


def format_counts(counts: Mapping[Any, int]) -> str:
    """``2,990 ok · 90 invalid``, in the order of RowStatus."""
    return " · ".join(f"{counts[status]:,} {status}" for status in RowStatus if counts.get(status))


def print_facts(facts: Mapping[str, Any]) -> None:
    """Print ``format_facts``."""
    click.echo(format_facts(facts))


def format_facts(facts: Mapping[str, Any]) -> str:
    """``name  value`` lines; what is empty is left out."""
    width = max(map(len, facts))
    shown = {name: value for name, value in facts.items() if value not in (None, "")}
    return "\n".join(
        f"{name:<{width}}  {f'{value:,}' if isinstance(value, int) else value}" for name, value in shown.items()
    )


def _read_progress(job: Job, settings: Settings) -> Progress:
    status = None if settings.broker_url else broker_status(settings)
    if status is not None and status.pid is None:
        return Progress()
    queue = Queue(settings, broker_url(settings))
    try:
        queue.check()
    except BrokerError:
        return Progress()
    return queue.read_progress(job)


def _try_agreement(job: Job) -> tuple[Agreement | None, str | None]:
    """Measure agreement; an input that changed meanwhile must not hide the rest of the summary."""
    try:
        return measure_agreement(job), None
    except NightmillError as error:
        return None, f"cannot be measured: {error}"


def _describe_agreement(agreement: Agreement | None) -> str:
    if agreement is None or agreement.share is None:
        return "no row has both a label and a gold value"
    text = f"{agreement.num_equal:,} of {agreement.num_compared:,} labelled rows"
    if agreement.commonest is not None:
        text += f"; always {agreement.commonest!r}: {agreement.num_commonest / agreement.num_compared:.1%}"
    return f"{agreement.share:.1%} ({text})"


def _print_first_rows(job: Job, success: Success) -> None:
    """Print the first rows of the first output that has any: what was asked, gold, the label, the status."""
    first = next((file for file in success.outputs if file.num_rows), None)
    if first is None:
        return
    names = output_names(job.spec.output_column)
    label, status, error = names.label, names.status, names.error
    rows, schema = _read_first_rows(first.uri)
    fields = _label_fields(label, schema.field(label).type)
    rows = [{**row, **{name: (row[label] or {}).get(key) for name, key in fields.items()}} for row in rows]
    columns = [*_shown_inputs(job, schema.names), *(fields or [label]), status]
    if any(row[error] for row in rows):
        columns.append(error)
    print_table(columns, [[cell(row[name]) for name in columns] for row in rows])


def _shown_inputs(job: Job, names: Sequence[str]) -> list[str]:
    """The input columns that a reader needs beside a label: those of the prompt, else the first ones, and gold."""
    gold, added = job.spec.gold_column, output_names(job.spec.output_column)
    inputs = [name for name in names if name not in added and name != gold]
    asked = [name for name in PromptBuilder(job.spec, job.input_schema).columns if name in inputs]
    return [*(asked or inputs)[:MAX_SHOWN_COLUMNS], *([gold] if gold in names else [])]


def _label_fields(label: str, kind: pa.DataType) -> dict[str, str]:
    """Column names for the fields of a small object, which then has no column of its own."""
    if not pa.types.is_struct(kind) or not 0 < kind.num_fields <= MAX_SHOWN_COLUMNS:
        return {}
    return {f"{label}.{field.name}": field.name for field in kind.fields}


def _read_first_rows(uri: str) -> tuple[list[dict[str, Any]], pa.Schema]:
    import pyarrow.parquet as pq

    with open_input(uri) as source:
        file = pq.ParquetFile(source)
        batch = next(file.iter_batches(NUM_SHOWN_ROWS), None)
        return ([] if batch is None else python_rows(batch)), file.schema_arrow


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], num_whole: int = 0) -> None:
    """Print a table to stdout, one line a row: where it is too wide, the widest columns give way.

    The first ``num_whole`` columns are never cut.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    natural = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    table = Table(box=None, pad_edge=False, padding=(0, COLUMN_GAP, 0, 0), header_style="bold")
    room = console.width - COLUMN_GAP * len(columns) - sum(natural[:num_whole])
    for name, width in zip(columns, natural[:num_whole] + fit_widths(natural[num_whole:], room), strict=True):
        table.add_column(Text(name), overflow="ellipsis", no_wrap=True, width=width)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    with console.capture() as capture:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def fit_widths(natural: Sequence[int], available: int) -> list[int]:
    """Widths of columns that sum up to ``available`` at most, unless that makes them unreadable."""
    widths = list(natural)
    while sum(widths) > available and max(widths) > MIN_COLUMN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    return widths


def cell(value: Any) -> str:
    """A value on one line, cut to ``MAX_CELL_CHARS``."""
    is_json = isinstance(value, dict | list | bool)
    text = json.dumps(value, ensure_ascii=False, default=str) if is_json else "" if value is None else str(value)
    text = " ".join(text.split())
    return text if len(text) <= MAX_CELL_CHARS else text[: MAX_CELL_CHARS - 1] + "…"
