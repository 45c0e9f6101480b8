"""``python -m jobs.unpause JOB``: go on with a paused job; returns at once, unlike `jobs.resume`."""

import click

from jobs.cli import verb
from schemas.errors import JobError
from schemas.settings import Settings


@verb("unpause")
@click.argument("job")
def main(settings: Settings, *, job: str) -> None:
    """Take back jobs.pause: workers go on with JOB where they were."""
    from jobs import api, show

    found = api.open_job(job, settings)
    if not found.is_paused():
        raise JobError(f"{found.job_id} is not paused but {found.state()}")
    found.unpause()
    show.show_queued(api.enqueue(found, settings), settings, as_json=False)


if __name__ == "__main__":
    main()
