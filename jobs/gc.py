"""``python -m jobs.gc``: which job directories and kept labels nobody needs any more; ``--yes`` removes them.

Never one that may still run, never the newest of a name, never one outside the jobs root. Knows no queue.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import click
import structlog

from jobs.cli import echo_json, verb
from jobs.job import JOB_FILE, JOB_NAME, PARTS, PLAN_FILE, Job
from jobs.ledger import LEDGER
from jobs.progress import format_bytes
from jobs.rehearsal import SAMPLE_FILE, SAMPLES
from jobs.store import Store, exists, open_store
from schemas.errors import JobError, NightmillError
from schemas.settings import Settings

DAY_S = 24 * 3600.0
MIN_ORPHAN_AGE_S = 3600.0  # a submit writes its plan before job.json

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Garbage:
    """A directory under the jobs root that can go."""

    name: str
    why: str
    num_files: int
    size_bytes: int


def find_garbage(store: Store, *, min_age_s: float, num_kept: int) -> list[Garbage]:
    """Return what can go: jobs that ended long ago, and directories that a crash left without ``job.json``.

    Of the jobs of one name the newest ``num_kept`` that ended stay: the next night is compared with them.
    """
    return [_measure(store, name, why) for name, why in _find_names(store, min_age_s, num_kept)]


def collect(store: Store, garbage: Garbage, *, min_age_s: float) -> bool:
    """Remove a directory, unless it has come to life meanwhile: False. After a crash midway, again."""
    if exists(store, f"{garbage.name}/{JOB_FILE}"):
        if not _is_old(Job.open(store, garbage.name).ended_s(), min_age_s):
            return False
        store.delete(f"{garbage.name}/{JOB_FILE}")  # first: from here on it is no job
    store.within(garbage.name).remove()
    return True


def _find_names(store: Store, min_age_s: float, num_kept: int) -> Iterator[tuple[str, str]]:
    job_ids = Job.list_ids(store)
    for name in store.list():
        if name not in job_ids and JOB_NAME.fullmatch(name) and _is_orphan(store, name):
            yield name, "it has no job.json: a submit or a removal was interrupted"
    ended: defaultdict[str, list[tuple[float, str, str]]] = defaultdict(list)
    for job_id in job_ids:
        try:
            job = Job.open(store, job_id)
        except JobError as error:
            log.warning("job_unusable", job=job_id, reason=str(error))
            continue
        if (ended_s := job.ended_s()) is not None:
            ended[job.spec.name].append((ended_s, job_id, job.state()))
    yield from _find_scopes(store, min_age_s)
    for name in store.list(SAMPLES):
        entry = store.stat(f"{SAMPLES}/{name}/{SAMPLE_FILE}")
        if entry is not None and _is_old(entry.modified_s, DAY_S):
            yield f"{SAMPLES}/{name}", "a dry run was interrupted"
    for jobs in ended.values():
        for ended_s, job_id, state in sorted(jobs, reverse=True)[num_kept:]:
            if _is_old(ended_s, min_age_s):
                yield job_id, f"{state} for {(time.time() - ended_s) / DAY_S:.0f} days"


def _find_scopes(store: Store, min_age_s: float) -> Iterator[tuple[str, str]]:
    """Yield the parts of the ledger that hold answers to what no job asks any more."""
    for scope in store.list(LEDGER):
        name = f"{LEDGER}/{scope}"
        used_s = max((entry.modified_s for entry in store.within(name).walk()), default=0.0)
        if _is_old(used_s, min_age_s):
            yield name, f"labels that no job has asked for in {(time.time() - used_s) / DAY_S:.0f} days"


def _is_orphan(store: Store, name: str) -> bool:
    if not exists(store, f"{name}/{PLAN_FILE}") and not store.list(f"{name}/{PARTS}"):
        return False
    newest_s = max((entry.modified_s for entry in store.within(name).walk()), default=0.0)
    return _is_old(newest_s, MIN_ORPHAN_AGE_S)


def _is_old(ended_s: float | None, min_age_s: float) -> bool:
    return ended_s is not None and time.time() - ended_s >= min_age_s


def _measure(store: Store, name: str, why: str) -> Garbage:
    entries = store.within(name).walk()
    return Garbage(name, why, len(entries), sum(entry.size_bytes for entry in entries))


@verb("gc")
@click.option(
    "--older-than", "days", type=click.FloatRange(0), default=30.0, show_default=True, metavar="DAYS", help="Ended so."
)
@click.option(
    "--keep", "num_kept", type=click.IntRange(0), default=2, show_default=True, help="Newest jobs kept of each name."
)
@click.option("--yes", is_flag=True, help="Remove it; without, only say what would be removed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def main(settings: Settings, *, days: float, num_kept: int, yes: bool, as_json: bool) -> None:
    """Say which job directories can go, their output files inside included, and which labels; remove them with --yes.

    Output that a job wrote elsewhere (--output) stays, and so does what may still run.
    """
    from jobs import show

    store = open_store(settings.jobs_root)
    found = find_garbage(store, min_age_s=days * DAY_S, num_kept=num_kept)
    removed = [_try_collect(store, garbage, days * DAY_S) for garbage in found] if yes else [False] * len(found)
    if as_json:
        for garbage, is_removed in zip(found, removed, strict=True):
            echo_json({**vars(garbage), "is_removed": is_removed})
        return
    if found:
        rows = [[item.name, f"{item.num_files:,}", format_bytes(item.size_bytes), item.why] for item in found]
        show.print_table(["directory", "files", "size", "why"], rows, num_whole=1)
    total = format_bytes(sum(item.size_bytes for item in found))
    if yes:
        click.echo(f"removed {sum(removed)} of {len(found)} directories, {total}")
    else:
        click.echo(f"{len(found)} directories, {total}, can go" + ("; remove them: --yes" if found else ""))


def _try_collect(store: Store, garbage: Garbage, min_age_s: float) -> bool:
    try:
        return collect(store, garbage, min_age_s=min_age_s)
    except NightmillError as error:
        click.echo(f"{garbage.name} stays: {error}", err=True)
        return False


if __name__ == "__main__":
    main()
