"""``python -m jobs.list``: every job under the jobs root, the newest first, from files alone."""

import click

from jobs.cli import echo_json, verb
from schemas.settings import Settings


@verb("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def main(settings: Settings, *, as_json: bool) -> None:
    """List all jobs with state and counts."""
    from jobs import api, show

    described = [show.describe_job(job) for job in api.open_jobs(settings)]
    if as_json:
        for fields in described:
            echo_json(fields)
    elif not described:
        click.echo(f"no jobs under {settings.jobs_root}")
    else:
        rows = [
            [
                fields["job_id"],
                str(fields["state"]),
                f"{fields['created'][:16].replace('T', ' ')}Z",
                f"{sum(fields['counts'].values()):,} of {fields['num_rows']:,}",
                show.format_counts(fields["counts"]),
            ]
            for fields in described
        ]
        show.print_table(["job", "state", "created", "rows", "counts"], rows, num_whole=4)


if __name__ == "__main__":
    main()
