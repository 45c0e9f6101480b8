"""``python -m jobs``: what can be done with jobs. Does none of it."""

import importlib
import pkgutil

import click

import jobs
from jobs.cli import EXIT_USAGE

NUM_COLUMNS = 90


def find_verbs() -> dict[str, click.Command]:
    """The command of each module that is one."""
    modules = (info.name for info in pkgutil.iter_modules(jobs.__path__) if info.name != "__main__")
    found = {name: getattr(importlib.import_module(f"jobs.{name}"), "main", None) for name in modules}
    return {name: command for name, command in found.items() if isinstance(command, click.Command)}


def main() -> int:
    """Print the verbs; exit code 2, since none was named."""
    for name, command in find_verbs().items():
        click.echo(f"python -m jobs.{name:<10} {command.get_short_help_str(NUM_COLUMNS)}", err=True)
    return EXIT_USAGE


if __name__ == "__main__":
    raise SystemExit(main())
