"""``python -m jobs.status [JOB]``: where a job stands, from its files; Redis only adds what runs right now."""

import time

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
    from jobs.wait import ENDED

    if job is None and not (jobs := api.open_jobs(settings)):
        raise JobNotFound(f"no jobs under {settings.jobs_root}")
    found = jobs[0] if job is None else api.open_job(job, settings)
    while True:
        if as_json:
            echo_json(show.describe_job(found, settings))
        else:
            show.show_job(found, settings)
        state = found.state()
        if not watch:
            return 0
        if state in ENDED:
            return EXIT_CODES.get(state, EXIT_FAILED)
        time.sleep(interval_s)
        if not as_json:
            click.echo()


if __name__ == "__main__":
    main()
