"""``schedules.toml``: which job runs when. Reads and checks tables, and says when they are due. Starts nothing.

A table has a cron line and a time zone, an input, and any option of ``python -m jobs.submit`` under its own name.
"""

import difflib
import inspect
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal
from zoneinfo import ZoneInfo

import click
from cronsim import CronSim, CronSimError
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from jobs import submit
from jobs.api import Submission, check_name
from jobs.cli import SETTINGS_OPTIONS
from jobs.store import stat_input
from schemas.errors import InputDataError, SettingsError
from schemas.records import Priority

SETTLED = frozenset(("name", "inputs", "output", "priority"))
"""Parameters of jobs.submit that the schedule settles itself."""

DATE = re.compile(r"\{date(?::([^{}]+))?\}")
BRACES = re.compile(r"\{[^{}]*\}")
LOOK_BACK = timedelta(hours=3)  # more than any clock was ever put back


class Schedule(BaseModel):
    """One table. ``options`` are those of jobs.submit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    cron: str
    timezone: str = "UTC"
    input: str | list[str]  # paths, globs or URIs; {date} in them is the due day, or another by days_back
    output: str | None = None
    days_back: int = 0  # 1: tonight labels yesterday's partition
    overlap: Literal["skip", "queue"] = "skip"  # while the run before is not done
    catch_up: bool = True  # run the last slot that was missed, however late; else only within an hour
    options: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return check_name(name)

    @field_validator("input", "output")
    @classmethod
    def _check_braces(cls, locations: str | list[str] | None) -> str | list[str] | None:
        for location in [locations] if isinstance(locations, str) else locations or ():
            if unknown := BRACES.findall(DATE.sub("", location)):
                raise ValueError(f"{location!r} has {unknown[0]}: write {{date}} or, say, {{date:%Y/%m/%d}}")
        return locations

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, key: str) -> str:
        try:
            ZoneInfo(key)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"{key!r} is no time zone: write a name such as Europe/Berlin or UTC") from error
        return key

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, line: str) -> str:
        if len(line.split()) != 5:
            raise ValueError(f"{line!r} needs five fields: minute, hour, day of month, month, day of week")
        try:
            next(CronSim(line, datetime(2000, 1, 1, tzinfo=UTC)))
        except (CronSimError, StopIteration) as error:
            raise ValueError(f"{line!r} is no cron line, or never due: {error or 'no such day'}") from error
        return line

    def due_after(self, moment: datetime) -> Iterator[datetime]:
        """Yield the due times after ``moment``, in UTC, without end.

        As Debian's cron: what is due in an hour that a clock change leaves out runs right after it, a time that
        comes twice counts once; lines whose hour or minute begins with ``*`` follow elapsed time instead.
        """
        last = moment
        for due in CronSim(self.cron, moment.astimezone(ZoneInfo(self.timezone))):
            if (due_utc := due.astimezone(UTC)) > last:
                last = due_utc
                yield due_utc

    def last_due(self, moment: datetime) -> datetime | None:
        """Return the latest due time that is not after ``moment``, in UTC; None if there was none for years."""
        backwards = CronSim(
            self.cron, (moment + timedelta(seconds=1)).astimezone(ZoneInfo(self.timezone)), reverse=True
        )
        found = None
        if (near := next(backwards, None)) is not None:
            for due in self.due_after(near.astimezone(UTC) - LOOK_BACK):  # so that both ways agree at clock changes
                if due > moment:
                    break
                found = due
        return found

    def due_on(self, day: date) -> list[datetime]:
        """Return the due times of a day in the schedule's time zone, in UTC."""
        zone = ZoneInfo(self.timezone)
        start = datetime(day.year, day.month, day.day, tzinfo=zone).astimezone(UTC)
        found = []
        for due in self.due_after(start - timedelta(seconds=1)):
            if due.astimezone(zone).date() != day:
                break
            found.append(due)
        return found

    def submission(self, due: datetime) -> Submission:
        """Return what the run of a due time asks for. Raises SettingsError, or what a file's reading raises."""
        day = due.astimezone(ZoneInfo(self.timezone)).date() - timedelta(days=self.days_back)
        locations = [self.input] if isinstance(self.input, str) else self.input
        try:
            return submit.make_submission(
                **_parse_options(self.name, self.options),
                name=self.name,
                inputs=tuple(_with_date(location, day) for location in locations),
                output=None if self.output is None else _with_date(self.output, day),
                priority=Priority.NIGHTLY,
                slot=due.astimezone(UTC).isoformat(timespec="minutes"),
            )
        except click.ClickException as error:
            raise SettingsError(f"[{self.name}]: {error.format_message()}") from error


OWN_KEYS = frozenset(Schedule.model_fields) - {"name", "options"}


def load_schedules(location: str) -> dict[str, Schedule]:
    """Read and check a file of schedules, by name; a missing one has none. Raises SettingsError naming the table.

    Files that a table names are read when it is due: ``Schedule.submission``.
    """
    if stat_input(location) is None:
        return {}
    try:
        tables = tomllib.loads(submit.load_text(location))
    except (tomllib.TOMLDecodeError, InputDataError) as error:
        raise SettingsError(f"{location} cannot be read: {error}") from error
    return {name: _make_schedule(location, name, table) for name, table in tables.items()}


def _make_schedule(location: str, name: str, table: Any) -> Schedule:
    if not isinstance(table, dict):
        raise SettingsError(f"{location}: {name} stands outside of a table: begin one with [NAME]")
    own = {key: value for key, value in table.items() if key in OWN_KEYS}
    options = {key: value for key, value in table.items() if key not in own}
    _check_keys(f"{location} [{name}]", options)
    try:
        schedule = Schedule(name=name, options=options, **own)
    except ValidationError as error:
        faults = [f"{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}" for fault in error.errors()]
        raise SettingsError(f"{location} [{name}]: {'; '.join(faults)}") from error
    except InputDataError as error:
        raise SettingsError(f"{location} [{name}]: {error}") from error
    _parse_options(f"{location} [{name}]", options)
    return schedule


def _check_keys(where: str, options: Mapping[str, Any]) -> None:
    """Refuse keys that are neither a schedule's nor options of jobs.submit, before one of them is missed elsewhere."""
    known = {*OWN_KEYS, *(flag.lstrip("-").replace("-", "_") for flag in _flags())}
    for key in options:
        if key.replace("-", "_") not in known:
            close = difflib.get_close_matches(key, known, 1)
            hint = (
                f"did you mean {close[0]!r}?" if close else "it takes a schedule's own and the options of jobs.submit"
            )
            raise SettingsError(f"{where}: unknown key {key!r}: {hint}")


def _flags() -> dict[str, str | None]:
    """The parameter's name of each flag of jobs.submit."""
    return {flag: option.name for option in submit.main.params for flag in (*option.opts, *option.secondary_opts)}


def _parse_options(where: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Turn a table's options into the parameters of make_submission, checked as on the command line."""
    arguments = ["-"]  # the inputs, which the command line demands
    for key, value in options.items():
        if isinstance(value, bool):
            arguments.append(_flag(key if value else f"no-{key}"))
        else:
            for each in value if isinstance(value, list) else [value]:
                arguments += [_flag(key), str(each)]
    try:
        parameters = dict(submit.main.make_context("submit", arguments).params)
    except click.ClickException as error:
        raise SettingsError(f"{where}: {error.format_message()}") from error
    outside = _outside_parameters()
    names = _flags()
    if refused := [key for key in options if names.get(_flag(key)) in outside]:
        raise SettingsError(f"{where}: {', '.join(refused)} cannot be set for a schedule")
    return {name: value for name, value in parameters.items() if name not in outside}


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _outside_parameters() -> set[str]:
    """Parameters of jobs.submit that are about the command or the machine, and those that are settled."""
    assert submit.main.callback is not None
    of_command = inspect.signature(submit.main.callback).parameters.keys()
    return {*of_command, *(str(option.name) for option in SETTINGS_OPTIONS), *SETTLED}


def _with_date(location: str, day: date) -> str:
    """Put a day in: ``{date}`` is 2026-11-30, ``{date:%Y/%m/%d}`` is written as strftime does."""
    return DATE.sub(lambda match: day.strftime(match[1] or "%Y-%m-%d"), location)
