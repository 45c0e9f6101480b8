import io
import json

import pytest

from jobs.progress import (
    BarReporter,
    JsonReporter,
    LineReporter,
    describe,
    format_bytes,
    format_duration,
    plain_counts,
)
from jobs.wait import Snapshot
from schemas.records import RowStatus


def snapshot(
    num_ok: int, num_bad: int = 0, rate: float | None = None, eta_s: float | None = None, num_running: int = 0
) -> Snapshot:
    counts = {RowStatus.OK: num_ok, RowStatus.INVALID: num_bad}
    return Snapshot("job", 2000, 4, 1, counts, 75.0, num_running, rate, eta_s)


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (75, "1:15"), (3700, "1:01:40"), (360000, "100:00:00")])
def test_durations_read_as_clocks(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_snapshot_in_words() -> None:
    assert describe(snapshot(1500, 20, 12.34, 39.0)) == "12.3 rows/s · 0:39 left · 1,500 ok · 20 not ok"
    assert describe(snapshot(0)) == "waiting for a worker"
    assert describe(snapshot(0, num_running=1)) == "working on the first rows"


def test_lines_come_when_something_changed_and_at_the_end() -> None:
    stream = io.StringIO()
    reporter = LineReporter(stream)
    for number in (0, 0, 5, 7):
        reporter.update(snapshot(number, num_running=1))
    reporter.note("something happened")
    reporter.close()
    reporter.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == [
        "0 / 2,000 rows",
        "something happened",
        "7 / 2,000 rows",
    ]


def test_json_lines_are_events(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = JsonReporter()
    for number, num_running in ((0, 0), (0, 0), (0, 1), (5, 1)):
        reporter.update(snapshot(number, rate=2.0, num_running=num_running))
    reporter.note("hello")
    reporter.close()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["progress", "progress", "progress", "note"]
    assert [event["num_running"] for event in events[:-1]] == [0, 1, 1]
    assert (events[2]["counts"], events[2]["rows_per_s"]) == ({"ok": 5}, 2.0)


def test_the_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = BarReporter(2000)
    reporter.update(snapshot(0))
    reporter.update(snapshot(5))
    reporter.note("[not markup]")
    reporter.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "[not markup]" in captured.err


def test_counts_keep_the_order_of_statuses_and_leave_out_zeros() -> None:
    counts = {RowStatus.SKIPPED: 1, RowStatus.OK: 2, RowStatus.FAILED: 0}
    assert list(plain_counts(counts).items()) == [("ok", 2), ("skipped", 1)]


def test_sizes_are_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 * 2**30, 2**45)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "32.0 TiB",
    ]
