from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from itertools import islice, pairwise, takewhile
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.schedules import Schedule, load_schedules
from schemas.errors import SettingsError
from schemas.records import Priority, RowStatus, Sampling

TABLE = """
[tickets]
cron = "0 2 * * *"
timezone = "Europe/Berlin"
input = "day={date}/*.parquet"
days_back = 1
output = "out/{date:%Y/%m/%d}"
choice = ["yes", "no"]
prompt = "Spam? {{ text }}"
max_tokens = 9
refresh = true
abort = ["invalid=2%"]
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], dict[str, Schedule]]:
    def load(text: str) -> dict[str, Schedule]:
        (tmp_path / "schedules.toml").write_text(text)
        return load_schedules(str(tmp_path / "schedules.toml"))

    return load


def schedule(cron: str, timezone: str = "UTC") -> Schedule:
    return Schedule(name="tickets", cron=cron, timezone=timezone, input="x")


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_a_table_says_what_the_submit_of_its_day_would(load: Callable[[str], dict[str, Schedule]]) -> None:
    submission = load(TABLE)["tickets"].submission(utc("2026-12-01T01:00"))
    assert (submission.inputs, submission.output) == (("day=2026-11-30/*.parquet",), "out/2026/11/30")
    assert (submission.name, submission.slot) == ("tickets", "2026-12-01T01:00+00:00")
    assert (submission.priority, submission.prompt_template) == (Priority.NIGHTLY, "Spam? {{ text }}")
    assert submission.constraint is not None
    assert (submission.sampling.max_tokens, submission.refresh) == (9, True)
    assert submission.thresholds is not None
    assert submission.thresholds.max_share == {RowStatus.INVALID: 0.02}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('cron = "61 2 * * *"', "cron: .*'61 2"),
        ('cron = "0 2 * *"', "five fields"),
        ('cron = "0 2 30 2 *"', "never due"),
        ('timezone = "Mars/Olympus"', "no time zone"),
        ("input = 3", "input"),
        ('overlap = "both"', "overlap"),
        ('catch_up = "no"', "catch_up"),
        ("temprature = 1", "unknown key 'temprature': did you mean 'temperature'"),
        ('crno = "0 2 * * *"', "unknown key 'crno': did you mean 'cron'"),
        ("frobnicate = 1", "unknown key 'frobnicate': it takes"),
        ('input = "day={dat}"', "input: 'day={dat}' has {dat}: write {date}"),
        ('output = ["x"]', "output: Input should be"),
        ("max_tokens = 'many'", "'many' is not a valid integer"),
        ('name = "x"', "name cannot be set"),
        ("jobs_root = '/x'", "jobs_root cannot be set"),
        ("dry_run = true", "dry_run cannot be set"),
        ("json = true", "json cannot be set"),
    ],
)
def test_a_wrong_line_is_named_with_its_table(load: Callable[[str], dict[str, Schedule]], line: str, told: str) -> None:
    key = line.partition(" = ")[0]
    lines = {"cron": 'cron = "0 2 * * *"', "input": 'input = "x"', key: line}
    with pytest.raises(SettingsError, match=rf"schedules\.toml \[tickets\].*{told}"):
        load("[tickets]\n" + "\n".join(lines.values()))


def test_a_file_that_is_no_toml_or_has_no_tables_is_refused_and_a_missing_one_has_none(
    load: Callable[[str], dict[str, Schedule]], tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load("[tickets\n")
    with pytest.raises(SettingsError, match="begin one with"):
        load('cron = "0 2 * * *"')
    with pytest.raises(SettingsError, match="'a b'"):
        load('["a b"]\ncron = "0 2 * * *"\ninput = "x"')
    assert load_schedules(str(tmp_path / "none.toml")) == {}


def test_a_time_that_a_clock_change_leaves_out_runs_right_after_it_and_one_that_comes_twice_runs_once() -> None:
    at_half_past_two = schedule("30 2 * * *", "Europe/Berlin")
    spring = list(islice(at_half_past_two.due_after(utc("2026-03-28T12:00")), 2))
    assert spring == [utc("2026-03-29T01:00"), utc("2026-03-30T00:30")]
    autumn = list(islice(at_half_past_two.due_after(utc("2026-10-24T12:00")), 2))
    assert autumn == [utc("2026-10-25T00:30"), utc("2026-10-26T01:30")]
    assert at_half_past_two.due_on(date(2026, 3, 29)) == [utc("2026-03-29T01:00")]


def test_an_hourly_line_follows_elapsed_time_through_clock_changes() -> None:
    hourly = schedule("0 * * * *", "Europe/Berlin")
    assert len(hourly.due_on(date(2026, 3, 29))) == 23
    assert len(hourly.due_on(date(2026, 10, 25))) == 25
    days = list(islice(hourly.due_after(utc("2026-10-24T00:30")), 60))
    assert {after - before for before, after in pairwise(days)} == {timedelta(hours=1)}


CRONS = ["30 2 * * *", "0 * * * *", "*/20 * * * *", "15 1-3 * * *", "0 3 1 * *", "45 23 * * 0", "0,30 2 * * 6,0"]
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Asia/Kathmandu"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CRONS), st.sampled_from(ZONES), st.datetimes(datetime(2026, 1, 1), datetime(2026, 12, 31)))
def test_the_last_due_time_is_the_last_of_those_counted_from_long_before(
    cron: str, zone: str, moment: datetime
) -> None:
    found, now = schedule(cron, zone), moment.replace(tzinfo=UTC, microsecond=0)
    before = list(takewhile(lambda due: due <= now, found.due_after(now - timedelta(days=40))))
    assert found.last_due(now) == before[-1]
    assert sorted(set(before)) == before


def test_days_are_those_of_the_time_zone() -> None:
    late = schedule("30 23 * * *", "America/New_York")
    (due,) = late.due_on(date(2026, 7, 1))
    assert due.astimezone(ZoneInfo("America/New_York")).date() == date(2026, 7, 1)
    assert late.submission(due).inputs == ("x",)
    assert late.submission(due).sampling == Sampling()


def test_a_value_out_of_range_is_an_error_of_its_schedule(load: Callable[[str], dict[str, Schedule]]) -> None:
    found = load('[tickets]\ncron = "0 2 * * *"\ninput = "x"\ntop_p = 7')["tickets"]
    with pytest.raises(SettingsError, match=r"\[tickets\].*top_p"):
        found.submission(utc("2026-12-01T02:00"))
