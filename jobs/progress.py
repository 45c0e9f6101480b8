"""Show a wait: a live bar on a terminal, plain lines elsewhere, JSON lines for programs. Decides nothing."""

import json
import sys
import time
from collections.abc import Mapping
from typing import IO

import click

from jobs.wait import Reporter, Snapshot
from schemas.records import RowStatus

LINE_INTERVAL_S = 10.0


def make_reporter(*, as_json: bool, num_rows: int) -> Reporter:
    """The reporter that fits where output goes: JSON to stdout, everything for people to stderr."""
    if as_json:
        return JsonReporter()
    return BarReporter(num_rows) if sys.stderr.isatty() else LineReporter()


class BarReporter:
    """A bar with rows per second, time left, and ok / not ok."""

    def __init__(self, num_rows: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("starting", total=num_rows)
        self._progress.start()

    def update(self, snapshot: Snapshot) -> None:
        """Redraw. Seconds before the first rows are counted: nothing to see is not nothing happening."""
        waited = "" if snapshot.num_done else f" · {format_duration(snapshot.elapsed_s)}"
        self._progress.update(self._task, completed=snapshot.num_done, description=describe(snapshot) + waited)

    def note(self, text: str) -> None:
        """Print above the bar."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._progress.stop()


class LineReporter:
    """A line when something changed, at most every ``LINE_INTERVAL_S`` seconds, and one at the end."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._next_s = 0.0
        self._shown = (-1, False)
        self._last: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Print if it is time."""
        self._last = snapshot
        if time.monotonic() >= self._next_s and news(snapshot) != self._shown:
            self._print(snapshot)

    def note(self, text: str) -> None:
        """Print at once."""
        click.echo(text, file=self._stream, err=self._stream is None)

    def close(self) -> None:
        """Print the last state if it was not shown."""
        if self._last is not None and self._last.num_done != self._shown[0]:
            self._print(self._last)

    def _print(self, snapshot: Snapshot) -> None:
        self._next_s = time.monotonic() + LINE_INTERVAL_S
        self._shown = news(snapshot)
        self.note(f"{snapshot.num_done:,} / {snapshot.num_rows:,} rows  {describe(snapshot)}")


class JsonReporter:
    """One JSON object a line: ``{"event": "progress" | "note", ...}``; progress only when it changed."""

    def __init__(self) -> None:
        self._shown: tuple[int, int, bool] | None = None

    def update(self, snapshot: Snapshot) -> None:
        """Print if rows or chunks came in."""
        key = (snapshot.num_committed, *news(snapshot))
        if key != self._shown:
            self._shown = key
            self._emit({"event": "progress", **snapshot_fields(snapshot)})

    def note(self, text: str) -> None:
        """Print a note event."""
        self._emit({"event": "note", "text": text})

    def close(self) -> None:
        """Nothing is left to print."""

    def _emit(self, event: Mapping[str, object]) -> None:
        click.echo(json.dumps(event))
        sys.stdout.flush()


def news(snapshot: Snapshot) -> tuple[int, bool]:
    """What a line tells that the one before may not have: rows done, and whether the work has begun."""
    return snapshot.num_done, snapshot.num_done > 0 or snapshot.num_running > 0


def describe(snapshot: Snapshot) -> str:
    """Rate, time left, ok and not ok, in words."""
    if snapshot.num_done == 0:
        return "working on the first rows" if snapshot.num_running else "waiting for a worker"
    parts = [f"{snapshot.num_ok:,} ok", f"{snapshot.num_done - snapshot.num_ok:,} not ok"]
    if snapshot.rows_per_s:
        parts.insert(0, f"{snapshot.rows_per_s:,.1f} rows/s")
    if snapshot.eta_s:
        parts.insert(1, f"{format_duration(snapshot.eta_s)} left")
    return " · ".join(parts)


def snapshot_fields(snapshot: Snapshot) -> dict[str, object]:
    """A snapshot as JSON fields."""
    return {
        "job_id": snapshot.job_id,
        "num_rows": snapshot.num_rows,
        "num_done": snapshot.num_done,
        "num_chunks": snapshot.num_chunks,
        "num_committed": snapshot.num_committed,
        "num_running": snapshot.num_running,
        "counts": plain_counts(snapshot.counts),
        "elapsed_s": round(snapshot.elapsed_s, 3),
        "rows_per_s": snapshot.rows_per_s,
        "eta_s": snapshot.eta_s,
    }


def plain_counts(counts: Mapping[RowStatus, int]) -> dict[str, int]:
    """Counts by status that are not zero, in the order of RowStatus."""
    return {str(status): counts[status] for status in RowStatus if counts.get(status)}


def format_duration(seconds: float) -> str:
    """``75`` -> ``1:15``, ``3700`` -> ``1:01:40``."""
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def format_bytes(number: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
