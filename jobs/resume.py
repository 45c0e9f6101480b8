"""``python -m jobs.resume JOB``: queue again exactly the chunks that have no part, and wait as submit does."""

import click

from jobs.cli import verb
from schemas.settings import Settings


@verb("resume")
@click.argument("job")
@click.option("--parked", is_flag=True, help="Try the chunks again that were given up.")
@click.option("--wait/--no-wait", "wait", default=None, help="[default: wait, unless a broker is configured]")
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout, for programs.")
def main(settings: Settings, *, job: str, parked: bool, wait: bool | None, as_json: bool) -> int:
    """Go on with JOB: interrupted, paused or cancelled ones too. Finished chunks are not computed again."""
    from jobs import api
    from jobs.follow import follow

    found = api.resume(api.open_job(job, settings), settings, parked=parked)
    return follow(found, settings, wait=wait, as_json=as_json)


if __name__ == "__main__":
    main()
