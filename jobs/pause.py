"""``python -m jobs.pause JOB``: start no more chunks of a job until `jobs.unpause`."""

import click

from jobs.cli import verb
from schemas.errors import JobError
from schemas.settings import Settings


@verb("pause")
@click.argument("job")
def main(settings: Settings, *, job: str) -> None:
    """Hold JOB: what runs is given up within seconds, nothing new is started until jobs.unpause."""
    from jobs import api

    found = api.open_job(job, settings)
    if (success := found.success()) is not None:
        raise JobError(f"{found.job_id} has ended already: {success.state}")
    found.pause()
    click.echo(f"paused {found.job_id}; go on: python -m jobs.unpause {found.job_id}")


if __name__ == "__main__":
    main()
