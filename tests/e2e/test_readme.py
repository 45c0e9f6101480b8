"""What the README tells a newcomer to type, typed: the first job, and a schedule with its nightly run and report."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.broker import stop_broker
from schemas.settings import Settings
from tests.demo_model import demo_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

TICKETS = ["I was charged twice.", "The app crashes when I open a file.", "Do you have an office in Oslo?"]


@pytest.fixture
def home(tmp_path: Path, repo_root: Path) -> Iterator[Path]:
    """A directory with the files that the README speaks of."""
    demo_model()
    pq.write_table(pa.table({"text": TICKETS}), tmp_path / "data.parquet")
    (tmp_path / "route.json").write_text((repo_root / "schemas" / "route.json").read_text())
    yield tmp_path
    stop_broker(Settings(state_dir=tmp_path / "state"))


def section(repo_root: Path, title: str) -> str:
    return (repo_root / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    """The ``python -m`` lines of a section's code, without their comments."""
    found = re.findall(r"^    python (-m (?:jobs|ops)\..+)$", text, flags=re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]


def run(home: Path, repo_root: Path, arguments: list[str]) -> str:
    """Run a command as a newcomer would; 3 says that some rows are not ok, which a small model's may be."""
    environment = {**os.environ, "NIGHTMILL_STATE_DIR": str(home / "state"), "PYTHONPATH": str(repo_root)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 3), done.stderr
    return done.stdout


def test_the_first_job_and_the_first_night(home: Path, repo_root: Path) -> None:
    first = [run(home, repo_root, command) for command in commands(section(repo_root, "Quick start"))]
    assert "output: " in "".join(first)
    nightly = section(repo_root, "Every night")
    (home / "schedules.toml").write_text(nightly.partition("```toml\n")[2].partition("```")[0])
    partition = home / "warehouse" / "tickets" / "day=2026-11-29"
    partition.mkdir(parents=True)
    pq.write_table(pa.table({"text": TICKETS}), partition / "tickets.parquet")
    shown = "".join(run(home, repo_root, command) for command in commands(nightly))
    assert f"copied: {len(TICKETS)} rows" in shown  # the first job has labelled them
    labels = pq.read_table(home / "warehouse" / "labels" / "day=2026-11-29")
    assert labels["text"].to_pylist() == TICKETS
    assert list((home / "state" / "jobs").glob("tickets-*/report.html"))
