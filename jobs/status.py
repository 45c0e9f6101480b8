"""``python -m jobs.status [JOB]``: where a job stands, from its files; Redis only adds what runs right now."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from jobs.cli import EXIT_FAILED, echo_json, verb
from schemas.errors import JobNotFound
from schemas.records import EXIT_CODES
from schemas.settings import Settings


@verb("status")
@click.argument("job", required=False)
@click.option("--watch", is_flag=True, help="Keep showing until the job ends; its exit code is the job's.")
@click.option("--interval", "interval_s", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Seconds.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document (a line each time with --watch).")
def main(settings: Settings, *, job: str | None, watch: bool, interval_s: float, as_json: bool) -> int:
    """Show where JOB stands (an id or the beginning of one; default: the newest job)."""
    from jobs import api, show
    from jobs.wait import ENDED, RateMeter

    if job is None and not (jobs := api.open_jobs(settings)):
        raise JobNotFound(f"no jobs under {settings.jobs_root}")
    found = jobs[0] if job is None else api.open_job(job, settings)
    meter = RateMeter()
    with _screen(is_live=watch and not as_json and sys.stdout.isatty()) as put:
        while True:
            fields = show.describe_job(found, settings)
            num_done = sum(fields["counts"].values()) + sum(fields.get("running", {}).values())
            rows_per_s = meter.measure(time.monotonic(), num_done)
            if as_json:
                echo_json({**fields, "rows_per_s": rows_per_s} if watch else fields)
            else:
                put(show.format_facts(show.job_facts(fields, rows_per_s)))
            if not watch:
                return 0
            if (state := found.state()) in ENDED:
                return EXIT_CODES.get(state, EXIT_FAILED)
            time.sleep(interval_s)


@contextmanager
def _screen(*, is_live: bool) -> Iterator[Callable[[str], None]]:
    """Yield what shows a text: in place of the one before on a terminal, below it elsewhere."""
    if not is_live:
        yield click.echo
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        yield lambda text: live.update(Text(text), refresh=True)


if __name__ == "__main__":
    main()
