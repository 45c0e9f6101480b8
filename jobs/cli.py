"""What all command lines share: settings flags, logging, and errors as one line and an exit code.

Knows no verb: one is ``@verb(NAME)`` over click options and a function of Settings that returns its exit code.
"""

import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from schemas.errors import NightmillError
from schemas.log import configure_logging
from schemas.settings import Settings

EXIT_FAILED = 1
EXIT_USAGE = 2  # click's, too
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

SETTINGS_OPTIONS = (
    click.Option(["--broker-url"], metavar="URL", help="Redis; without one an embedded server and worker are used."),
    click.Option(["--jobs-root"], metavar="DIR", help="Directory or object-store URI of the job directories."),
    click.Option(["--state-dir"], metavar="DIR", type=click.Path(path_type=Path), help="This machine's own state."),
    click.Option(["--log-level"], metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.  [default: WARNING]"),
)
"""Flags that override Settings, in every verb."""


def verb(name: str) -> Callable[[Callable[..., int | None]], click.Command]:
    """Make a click command of ``function(settings, **options)``; its return value is the exit code, None means 0."""

    def decorate(function: Callable[..., int | None]) -> click.Command:
        @functools.wraps(function)
        def run(
            *,
            broker_url: str | None,
            jobs_root: str | None,
            state_dir: Path | None,
            log_level: str | None,
            **options: Any,
        ) -> None:
            overrides = {"broker_url": broker_url, "jobs_root": jobs_root, "state_dir": state_dir}
            sys.exit(run_reporting_errors(lambda: function(load_settings(overrides, log_level), **options)))

        context = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
        command = click.command(name=name, context_settings=context)(run)
        command.params.extend(SETTINGS_OPTIONS)
        return command

    return decorate


def load_settings(overrides: dict[str, Any], log_level: str | None = None) -> Settings:
    """Build Settings from flags that were given, and set up logging: warnings only, unless a level was asked for."""
    given = {key: value for key, value in overrides.items() if value is not None}
    if log_level is not None:
        given["log"] = {"level": log_level.upper()}
    settings = Settings.load(**given)
    level = settings.log.level if "level" in settings.log.model_fields_set else "WARNING"
    configure_logging(level, settings.log.format)
    return settings


def run_reporting_errors(function: Callable[[], int | None]) -> int:
    """Run a verb's body: its exit code, or a NightmillError's after printing it to stderr without a traceback."""
    try:
        return function() or 0
    except NightmillError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return EXIT_INTERRUPTED


@contextmanager
def ending_like_ctrl_c() -> Iterator[None]:
    """Make SIGTERM and a closed terminal end the block as Ctrl-C does, so that what it started is stopped."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # what nohup made ignored stays ignored
    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    previous = [signal.signal(number, interrupt) for number in wanted]
    try:
        yield
    finally:
        for number, handler in zip(wanted, previous, strict=True):
            signal.signal(number, handler)


def split_names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """Make names of an option's ``a,b``; for click."""
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


def echo_json(value: Any) -> None:
    """Print one JSON document on one line of stdout."""
    click.echo(json.dumps(value, default=str))
