"""``python -m jobs.cancel JOB``: stop a job; finished chunks stay, and `jobs.resume` goes on from them."""

import click

from jobs.cli import verb
from schemas.errors import JobError
from schemas.settings import Settings


@verb("cancel")
@click.argument("job")
def main(settings: Settings, *, job: str) -> None:
    """Stop JOB. Running chunks end within seconds; finished ones stay."""
    from jobs import api
    from jobs.ledger import keep_answers

    found = api.open_job(job, settings)
    if (success := found.success()) is not None:
        raise JobError(f"{found.job_id} has ended already: {success.state}")
    found.cancel()
    keep_answers(found)
    click.echo(f"cancelled {found.job_id}; go on: python -m jobs.resume {found.job_id}")


if __name__ == "__main__":
    main()
