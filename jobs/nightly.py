"""``python -m jobs.nightly NAME --date D``: run a schedule by hand; ``--list`` shows what runs when.

A slot is a schedule and a due time. Its file in the jobs root is created once, with the job's whole spec in it: beat,
a second beat, or a person starts the same job, also after a crash. Redis decides nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import click
import msgspec
import structlog

from jobs.cli import EXIT_FAILED, echo_json, verb
from jobs.job import Job
from jobs.schedules import Schedule, load_schedules
from jobs.store import Store, absolute_location, exists, open_store
from jobs.thresholds import Thresholds
from schemas.errors import AlreadyExists, InputDataError, JobError, JobNotFound, NightmillError, NotFound, SettingsError
from schemas.records import FORMAT_VERSION, JobSpec, JobState, Priority, Record, decode_json, encode_json
from schemas.settings import Settings

NIGHTLY = "_nightly"  # in the jobs root: a directory for each schedule
SINCE, STARTED = "_since.json", ".started"
DUE_FORMAT = "%Y%m%dT%H%MZ"
DUE_NAME = re.compile(r"\d{8}T\d{4}Z\.json")
LATE = timedelta(hours=1)
RETRY = timedelta(minutes=5)
MAX_WAIT_S = 60.0  # between looks at the file of schedules
NUM_LISTED = 3
UNFINISHED = (JobState.QUEUED, JobState.RUNNING, JobState.PAUSED)

log = structlog.get_logger(__name__)


class Slot(Record):
    """The content of a slot's file: the job that it is, or why there is none."""

    schedule: str
    due: str  # UTC, ISO 8601
    claimed: str  # UTC, ISO 8601
    spec: JobSpec | None = None
    output: str | None = None
    thresholds: Thresholds | None = None
    skipped: str | None = None
    format_version: int = FORMAT_VERSION


class Beat:
    """Fires what is due, as seen by one process; several may run at once. ``clock`` tells the time in UTC."""

    def __init__(self, settings: Settings, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        """Raises SettingsError if the schedules are wrong."""
        self._settings = settings
        self._clock = clock
        self._schedules = load_schedules(settings.schedules)
        self._announce()
        self._retry_at: dict[str, datetime] = {}

    def tick(self) -> float:
        """Fire every schedule whose last due time has no slot yet; return the seconds until the next look."""
        self._reload()
        for schedule in self._schedules.values():
            try:
                self._fire_if_due(schedule)
            except NightmillError as error:
                self._retry_at[schedule.name] = self._clock() + RETRY
                log.error("slot_failed", schedule=schedule.name, reason=str(error), retry_s=RETRY.total_seconds())
            except Exception:  # the others must run
                self._retry_at[schedule.name] = self._clock() + RETRY
                log.exception("slot_broke", schedule=schedule.name, retry_s=RETRY.total_seconds())
        now = self._clock()
        waits = [(next(schedule.due_after(now)) - now).total_seconds() for schedule in self._schedules.values()]
        return max(0.0, min([*waits, MAX_WAIT_S]))

    def _reload(self) -> None:
        before = self._schedules
        try:
            self._schedules = load_schedules(self._settings.schedules)
        except NightmillError as error:
            log.error("schedules_unusable", reason=str(error), kept=sorted(self._schedules))
        if self._schedules != before:
            self._announce()

    def _announce(self) -> None:
        """Say now what would come to light at night: what is due when, and what keeps it from running."""
        if not self._schedules:
            log.warning("no_schedules", file=absolute_location(self._settings.schedules))
        for schedule in self._schedules.values():
            due = next(schedule.due_after(self._clock()))
            log.info("schedule", schedule=schedule.name, next=due.isoformat(timespec="minutes"))
            if problem := find_problem(schedule, due):
                log.error("schedule_cannot_run", schedule=schedule.name, reason=problem)

    def _fire_if_due(self, schedule: Schedule) -> None:
        now, store = self._clock(), open_store(self._settings.jobs_root)
        due = schedule.last_due(now)
        since = first_seen(store, schedule, now)
        if due is None or due < since or now < self._retry_at.get(schedule.name, now):
            return
        if is_started(store, schedule, due) or (not schedule.catch_up and now - due > LATE):
            return
        slot = fire(schedule, due, self._settings, now=now)
        self._retry_at.pop(schedule.name, None)
        job_id = None if slot.spec is None else slot.spec.job_id
        log.info("slot_fired", schedule=schedule.name, due=slot.due, job=job_id, skipped=slot.skipped)


def fire(schedule: Schedule, due: datetime, settings: Settings, *, now: datetime, by_hand: bool = False) -> Slot:
    """Claim the slot, unless somebody has, and start its job, unless it is. Fired again, it is the same job.

    By hand also while the run before is not done. Raises what preparing or starting a job raises.
    """
    store = open_store(settings.jobs_root)
    slot = read_slot(store, schedule, due)
    if slot is not None and slot.skipped is not None and by_hand:
        store.delete(_key(schedule, due))
        slot = None
    if slot is None:
        slot = _claim(store, schedule, due, settings, now=now, by_hand=by_hand)
    if slot.spec is not None and not is_started(store, schedule, due):
        _start(slot, slot.spec, settings)
        _create_or_keep(store, _key(schedule, due, STARTED), b"")
    return slot


def read_slot(store: Store, schedule: Schedule, due: datetime) -> Slot | None:
    """Return what became of a slot; None if nobody has claimed it. Raises JobError."""
    key = _key(schedule, due)
    try:
        return decode_json(store.read(key), Slot)
    except NotFound:
        return None
    except msgspec.MsgspecError as error:
        raise JobError(f"{store.locate(key)} cannot be read: {error}") from error


def is_started(store: Store, schedule: Schedule, due: datetime) -> bool:
    """Say whether the slot's job was made and queued, or skipped."""
    slot = read_slot(store, schedule, due)
    return slot is not None and (slot.skipped is not None or exists(store, _key(schedule, due, STARTED)))


def first_seen(store: Store, schedule: Schedule, now: datetime) -> datetime:
    """Return when beat first saw the schedule: what was due before was never missed."""
    key = f"{NIGHTLY}/{schedule.name}/{SINCE}"
    _create_or_keep(store, key, encode_json(now))
    return decode_json(store.read(key), datetime)


def last_job(store: Store, schedule: Schedule, before: datetime | None = None) -> Job | None:
    """Return the job of the latest slot that has one, of those due before a time."""
    names = [name for name in store.list(f"{NIGHTLY}/{schedule.name}") if DUE_NAME.fullmatch(name)]
    for name in sorted(names, reverse=True):
        due = datetime.strptime(name, f"{DUE_FORMAT}.json").replace(tzinfo=UTC)
        slot = read_slot(store, schedule, due) if before is None or due < before else None
        if slot is not None and slot.spec is not None:
            try:
                return Job.open(store, slot.spec.job_id)
            except JobNotFound:
                return None  # removed since
    return None


def find_problem(schedule: Schedule, due: datetime) -> str | None:
    """Say what is wrong with what a schedule asks for, its input aside, which may come later; None if nothing is."""
    try:
        schedule.submission(due)
    except NightmillError as error:
        return str(error)
    return None


def _claim(
    store: Store, schedule: Schedule, due: datetime, settings: Settings, *, now: datetime, by_hand: bool
) -> Slot:
    """Write the slot's file and return what it says: whoever was first decides what the job is."""
    from jobs import api

    slot = Slot(
        schedule=schedule.name, due=due.isoformat(timespec="minutes"), claimed=now.isoformat(timespec="seconds")
    )
    before = None if by_hand or schedule.overlap == "queue" else last_job(store, schedule, due)
    if before is not None and (state := before.state()) in UNFINISHED:
        slot = msgspec.structs.replace(slot, skipped=f"{before.job_id} was {state}")
    else:
        prepared = api.prepare(schedule.submission(due), settings)
        found = {"spec": prepared.spec, "output": prepared.output, "thresholds": prepared.thresholds}
        slot = msgspec.structs.replace(slot, **found)
    _create_or_keep(store, _key(schedule, due), encode_json(slot))
    return read_slot(store, schedule, due) or slot


def _start(slot: Slot, spec: JobSpec, settings: Settings) -> None:
    """Make the job that the slot's file holds, and queue it. Raises JobError if its inputs changed since the claim."""
    from jobs import api
    from jobs.source import rescan_inputs

    prepared = api.prepare_spec(
        spec,
        rescan_inputs(spec.inputs),
        settings,
        output=slot.output,
        thresholds=slot.thresholds,
        priority=Priority.NIGHTLY,
    )
    api.submit(prepared, settings)


def _key(schedule: Schedule, due: datetime, suffix: str = ".json") -> str:
    return f"{NIGHTLY}/{schedule.name}/{due.astimezone(UTC).strftime(DUE_FORMAT)}{suffix}"


def _create_or_keep(store: Store, key: str, data: bytes) -> None:
    with suppress(AlreadyExists):
        store.create(key, data)


def _find(schedules: Mapping[str, Schedule], name: str | None, location: str) -> Schedule:
    if name is not None and name in schedules:
        return schedules[name]
    if not schedules:
        raise SettingsError(_describe_lack(location))
    which = "say which schedule" if name is None else f"no schedule {name!r}"
    raise SettingsError(f"{location}: {which}; there are {', '.join(schedules)}")


def _describe_lack(location: str) -> str:
    return f"no schedules: {absolute_location(location)} is missing or has no table"


def _parse_due(schedule: Schedule, text: str | None, now: datetime) -> datetime:
    """Return the slot that ``--date`` means: a day's last one, or that of a due time; without it the last one."""
    if text is None:
        due = schedule.last_due(now)
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError as error:
            raise InputDataError(f"--date {text!r} is no day such as 2026-11-30, nor a time of one") from error
        zone = ZoneInfo(schedule.timezone)
        wanted = moment.replace(tzinfo=moment.tzinfo or zone).astimezone(UTC)
        on_day = schedule.due_on(wanted.astimezone(zone).date())
        due = next((due for due in reversed(on_day) if len(text) <= len("2026-11-30") or due == wanted), None)
    if due is None:
        raise InputDataError(f"{schedule.name} ({schedule.cron}, {schedule.timezone}) is not due {text or 'ever'}")
    return due


def _describe(schedule: Schedule, store: Store, now: datetime) -> dict[str, Any]:
    zone, job = ZoneInfo(schedule.timezone), last_job(store, schedule)
    runs = [due.astimezone(zone).isoformat(timespec="minutes") for due in islice(schedule.due_after(now), NUM_LISTED)]
    last = {} if job is None else {"last_job": job.job_id, "last_slot": job.spec.slot, "last_state": str(job.state())}
    found = {"name": schedule.name, "cron": schedule.cron, "timezone": schedule.timezone, "next": runs, **last}
    problem = find_problem(schedule, next(schedule.due_after(now)))
    return found if problem is None else {**found, "problem": problem}


def _show_list(described: Sequence[Mapping[str, Any]], location: str, *, as_json: bool) -> None:
    from jobs.show import print_table

    if as_json:
        for fields in described:
            echo_json({"event": "schedule", **fields})
        return
    if not described:
        click.echo(_describe_lack(location))
        return
    columns = ("name", "next", "last_job", "last_state")
    rows = [[" ".join(d["next"]) if c == "next" else d.get(c, "") for c in columns] for d in described]
    print_table(["schedule", "next runs", "last job", "state"], rows, num_whole=2)
    for fields in described:
        if "problem" in fields:
            click.echo(f"[{fields['name']}] cannot run: {fields['problem']}", err=True)


@verb("nightly")
@click.argument("name", required=False)
@click.option(
    "--date", "day", metavar="DATE", help="A day, or a due time, in the schedule's zone.  [default: the last]"
)
@click.option("--list", "is_listing", is_flag=True, help="Show all schedules, their next runs and their last jobs.")
@click.option("--wait/--no-wait", "wait", default=None, help="[default: wait, unless a broker is configured]")
@click.option("--json", "as_json", is_flag=True, help="JSON lines on stdout, for programs.")
def main(
    settings: Settings, *, name: str | None, day: str | None, is_listing: bool, wait: bool | None, as_json: bool
) -> int:
    """Run the schedule NAME of schedules.toml by hand: the same job as if beat had run it, and beat will not again."""
    from jobs.follow import follow

    schedules, now, store = load_schedules(settings.schedules), datetime.now(UTC), open_store(settings.jobs_root)
    if is_listing:
        described = [_describe(schedule, store, now) for schedule in schedules.values()]
        _show_list(described, settings.schedules, as_json=as_json)
        return EXIT_FAILED if any("problem" in fields for fields in described) else 0
    schedule = _find(schedules, name, settings.schedules)
    slot = fire(schedule, _parse_due(schedule, day, now), settings, now=now, by_hand=True)
    assert slot.spec is not None, "by hand no slot is skipped"
    return follow(Job.open(store, slot.spec.job_id), settings, wait=wait, as_json=as_json)


if __name__ == "__main__":
    main()
