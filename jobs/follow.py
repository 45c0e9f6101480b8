"""What a waiting verb does once its job is queued: wait with a display, survive Ctrl-C, print the summary.

Embedded mode (no broker configured): a worker runs for as long as the wait. Knows no options.
"""

import click

from jobs import api, show
from jobs.cli import EXIT_FAILED, EXIT_INTERRUPTED, echo_json, ending_like_ctrl_c
from jobs.job import Job
from jobs.progress import make_reporter
from jobs.report import ensure_report
from jobs.store import open_store
from jobs.wait import ENDED
from schemas.records import EXIT_CODES
from schemas.settings import Settings


def follow(job: Job, settings: Settings, *, wait: bool | None, as_json: bool) -> int:
    """Wait for ``job`` unless told not to, print what became of it, and return the exit code.

    ``wait`` None: in the embedded mode only.
    """
    state = job.state()
    is_embedded = settings.broker_url is None
    if state not in ENDED:
        if not (is_embedded if wait is None else wait):
            show.show_queued(job, settings, as_json=as_json)
            return 0
        try:
            with ending_like_ctrl_c():
                state = api.wait(job, settings, make_reporter(as_json=as_json, num_rows=job.num_rows))
        except KeyboardInterrupt:
            return _say_how_to_go_on(job, is_embedded=is_embedded, as_json=as_json)
    ensure_report(job, open_store(settings.jobs_root), settings.jobs)
    show.show_summary(job, state, as_json=as_json)
    return EXIT_CODES.get(state, EXIT_FAILED)


def _say_how_to_go_on(job: Job, *, is_embedded: bool, as_json: bool) -> int:
    fate = "stopped; nothing is lost" if is_embedded else "goes on without this terminal"
    status, resume = f"python -m jobs.status {job.job_id}", f"python -m jobs.resume {job.job_id}"
    if as_json:
        echo_json({"event": "interrupted", "job_id": job.job_id, "status": status, "resume": resume})
    else:
        click.echo(f"job {job.job_id} {fate}\n  look:  {status}\n  go on: {resume}", err=True)
    return EXIT_INTERRUPTED
