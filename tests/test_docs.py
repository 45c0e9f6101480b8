"""What the documents say holds: settings, options, files, and nothing about the machine they were written on."""

import importlib
import re
from pathlib import Path

import click
import pytest
from pydantic_core import PydanticUndefined

from schemas.settings import Section, Settings

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "ops/runbook.md")

# Written so that this file does not match itself.
OF_ONE_MACHINE = re.compile(
    r"/roo[t]/|/wor[k]/|/opt/(?:wheel|pyp)[si]|pypi\.or[g]|pythonhoste[d]|download\.pytorc[h]|deb\.debia[n]"
)


def settings_in_code() -> dict[str, str]:
    """Each environment variable and its default as the documents write it."""
    found: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            for key, inner in annotation.model_fields.items():
                found[f"NIGHTMILL_{name}__{key}".upper()] = _shown(inner.default)
        else:
            found[f"NIGHTMILL_{name}".upper()] = _shown(field.default)
    return found


def _shown(default: object) -> str:
    """A computed, absent or empty default is described in words, which stand outside of backticks."""
    if default is None or default is PydanticUndefined or default == "":
        return ""
    return (
        str(default).lower()
        if isinstance(default, bool)
        else f"{default:g}"
        if isinstance(default, float)
        else str(default)
    )


def settings_in_runbook(text: str) -> dict[str, str]:
    rows = re.findall(r"^\| `(NIGHTMILL_\w+)` \| ([^|]*) \|", text, flags=re.MULTILINE)
    return {name: default.strip().strip("`") if "`" in default else "" for name, default in rows}


def test_the_runbook_lists_every_setting_with_its_default(repo_root: Path) -> None:
    assert settings_in_runbook((repo_root / "ops" / "runbook.md").read_text()) == settings_in_code()


def commands_in(text: str) -> list[tuple[str, set[str]]]:
    """(module, options) of each ``python -m MODULE ...`` of our own in code; a trailing backslash continues a line."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"python -m ((?:jobs|ops)[\w.]*)([^\n`#]*)", joined)
    return [(module, set(re.findall(r"(?<!\S)(--[\w-]+)", rest))) for module, rest in found]


def options_of(module: str) -> set[str]:
    """Every option that the module's command, or any of its subcommands, takes."""
    name = f"{module}.__main__" if module in ("ops.bench",) else module
    commands = [value for value in vars(importlib.import_module(name)).values() if isinstance(value, click.Command)]
    options = {"--help"}
    while commands:
        command = commands.pop()
        options.update(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))
        if isinstance(command, click.Group):
            commands.extend(command.commands.values())
    return options


@pytest.mark.parametrize("document", [*DOCUMENTS, "Makefile"])
def test_commands_in_documents_take_the_options_they_are_shown_with(repo_root: Path, document: str) -> None:
    commands = commands_in((repo_root / document).read_text())
    wrong = {
        f"{module} {option}"
        for module, options in commands
        for option in options - options_of(module)
        if module != "jobs.broker"  # plain words, no options
    }
    assert wrong == set()


def test_readme_describes_only_options_that_submit_has(repo_root: Path) -> None:
    section = (repo_root / "README.md").read_text().partition("<!-- submit options -->")[2].partition("<!-- end -->")[0]
    described = set(re.findall(r"`(--[\w-]+)", section))
    assert described, "the table of submit's options is gone"
    assert described - options_of("jobs.submit") == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_documents_link_to_exist(repo_root: Path, document: str) -> None:
    path = repo_root / document
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_changelog_starts_with_what_is_unreleased(repo_root: Path) -> None:
    headings = re.findall(r"^## (.+)$", (repo_root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0].startswith("[Unreleased]")


def test_tracked_files_name_no_registry_and_no_path_of_one_machine(tracked_files: list[Path]) -> None:
    found = [
        f"{path}: {match[0]}"
        for path in tracked_files
        if path.suffix != ".parquet"
        for match in OF_ONE_MACHINE.finditer(path.read_text(errors="replace"))
    ]
    assert found == []
