"""``python -m jobs.report JOB``: one self-contained HTML page about a job, rendered from files alone.

Written beside the job's files when it ends. The page runs no script and loads nothing. Knows no queue.
"""

import re

import click
import jinja2
import msgspec
import structlog

from jobs import report_sections as sections
from jobs.cli import verb
from jobs.drift import describe_drift
from jobs.job import ENFORCEMENT_FILE, REPORT_FILE, Job
from jobs.labels import LABELLED
from jobs.locations import split_location
from jobs.progress import format_duration
from jobs.provenance import measure_throughput
from jobs.statistics import Gold, collect, count_labels
from jobs.store import Store, exists, open_store, replace
from schemas.errors import NightmillError, NotFound
from schemas.plan import KeywordDecision
from schemas.records import JobState
from schemas.settings import JobsSettings, Settings

log = structlog.get_logger(__name__)


def render_report(job: Job, settings: JobsSettings, previous: Job | None = None) -> str:
    """The page; ``previous`` is the job whose labels are shown beside this one's. Raises JobError for damaged parts."""
    found, success, chunks = collect(job), job.success(), job.provenances()
    throughput = measure_throughput(chunks)
    figures, tables = sections.describe_labels(found.labels, count_labels(previous) if previous else {})
    failures, num_hidden = sections.list_failures(job, found)
    tokens, token_charts = sections.describe_tokens(found)
    cost, price = sections.describe_cost(chunks, found, settings)
    state, num_labelled = job.state(), sum(found.statuses[status] for status in LABELLED)
    rate = throughput.rows_per_s if throughput else None
    cards = {
        "rows": sections.number(found.num_rows),
        "labelled": sections.percent(num_labelled, found.num_rows),
        "accuracy": sections.percent(found.gold.num_equal, found.gold.num_compared) if found.gold else "",
        "rows/s": f"{rate:,.1f}" if rate else "",
        "time": format_duration(throughput.busy_s) if throughput else "",
        "cost": price,
    }
    failure = job.failure() if success is None else None
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jobs"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template(REPORT_FILE).render(
        job_id=job.job_id,
        state=state.replace("_", " "),
        is_good=state in (JobState.DONE, JobState.RUNNING, JobState.QUEUED),
        when=f"submitted {sections.moment(job.created)}"
        + (f", ended {sections.moment(success.finished)}" if success else ""),
        cause=failure.cause if failure else success and success.commonest_error,
        cards=[(name, value) for name, value in cards.items() if value],
        counts=sections.describe_counts(job, found, success),
        labels=figures,
        has_labels=num_labelled > 0,
        label_tables=tables,
        previous=previous and f"{previous.job_id}, submitted {sections.moment(previous.created)}",
        drift=describe_drift(job, previous),
        gold=_describe_gold(job, found.gold, found.gold_problem),
        confidence=sections.describe_confidence(found),
        least_certain=sections.list_least_certain(job, found),
        failures=failures,
        num_hidden_failures=num_hidden,
        attempts=sections.list_attempts(found),
        tokens=tokens,
        token_charts=token_charts,
        speed=sections.describe_speed(throughput),
        latency=sections.list_latencies(found),
        timelines=sections.draw_timelines(chunks),
        cost=cost,
        enforcement=_read_enforcement(job),
        lineage=sections.describe_lineage(job, chunks, success),
        sources=sections.list_sources(job),
        kernels=sections.list_kernels(chunks),
    )


def write_report(job: Job, root: Store, settings: JobsSettings) -> str:
    """Render the report into the job's directory, compared with the night before; return where it is."""
    page = render_report(job, settings, find_previous(job, root))
    replace(job.store, REPORT_FILE, page.encode())
    return job.store.locate(REPORT_FILE)


def ensure_report(job: Job, root: Store, settings: JobsSettings) -> None:
    """Write the report of an ended job unless it is there or not wanted.

    Whatever goes wrong is logged and nothing more: the labels are there, and a page must not cost a job its exit code.
    """
    try:
        if settings.report and job.success() is not None and not exists(job.store, REPORT_FILE):
            write_report(job, root, settings)
    except NightmillError as error:
        log.warning("report_not_written", job=job.job_id, reason=str(error))
    except Exception:
        log.exception("report_not_written", job=job.job_id)


def find_previous(job: Job, root: Store) -> Job | None:
    """The job of the same name that was submitted last before this one and has ended."""
    alike = re.compile(re.escape(job.spec.name) + "-[0-9a-f]{12}")
    jobs = [Job.open(root, job_id) for job_id in Job.list_ids(root) if alike.fullmatch(job_id)]
    earlier = [other for other in jobs if other.created < job.created and other.success() is not None]
    return max(earlier, key=lambda other: other.created, default=None)


def _describe_gold(job: Job, gold: Gold | None, problem: str | None) -> dict[str, object] | None:
    column = job.spec.gold_column
    if column is None:
        return None
    if gold is None:
        return {"column": column, "problem": f"This cannot be told: {problem}."}
    return {"problem": None, **sections.describe_gold(column, gold)}


def _read_enforcement(job: Job) -> list[tuple[str, str, str]]:
    try:
        decisions = msgspec.json.decode(job.store.read(ENFORCEMENT_FILE), type=list[KeywordDecision])
    except NotFound:  # the job was made before there were any, or by hand
        return []
    return [(str(d.decision), d.path, d.reason) for d in decisions]


@verb("report")
@click.argument("job")
@click.option(
    "--to", "location", metavar="FILE", help="Where to write it.  [default: report.html of the job's directory]"
)
def main(settings: Settings, *, job: str, location: str | None) -> None:
    """Write the report of JOB anew, of a job that still runs too, and say where it is."""
    from jobs import api

    found, root = api.open_job(job, settings), open_store(settings.jobs_root)
    if location is None:
        click.echo(write_report(found, root, settings.jobs))
        return
    directory, name = split_location(location)
    page = render_report(found, settings.jobs, find_previous(found, root))
    target = open_store(directory)
    replace(target, name, page.encode())
    target.sweep()
    click.echo(location)


if __name__ == "__main__":
    main()
