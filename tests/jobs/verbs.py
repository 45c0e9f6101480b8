"""A machine to type verbs on: a state directory, a model directory, Parquet files. Verbs run in this process."""

import importlib
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner, Result

from jobs.broker import ensure_broker, stop_broker
from jobs.job import Job
from jobs.queue import Queue
from jobs.store import open_store
from schemas.records import RowResult, RowStatus
from schemas.settings import Settings
from tests.waiting import wait_until

DEADLINE_S = 30.0


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until ``condition()`` is truthy and return it."""
    return wait_until(condition, what, deadline_s)


class Machine:
    """Everything under one directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        self.settings = Settings(state_dir=path / "state")

    def write(self, name: str, **columns: Any) -> str:
        """A Parquet file of these columns."""
        location = str(self.path / name)
        pq.write_table(pa.table(columns), location)
        return location

    def write_rows(self, num_rows: int, name: str = "data.parquet") -> str:
        """A file with columns id, text and kind."""
        rows = range(num_rows)
        return self.write(
            name, id=list(rows), text=[f"message {i}" for i in rows], kind=["a" if i % 2 else "b" for i in rows]
        )

    def run(self, verb: str, *arguments: str) -> Result:
        """Run ``python -m jobs.VERB`` in this process, on this machine's state."""
        command: click.Command = importlib.import_module(f"jobs.{verb}").main
        return CliRunner().invoke(command, [*arguments, *self.flags])

    def submit(self, *arguments: str) -> Result:
        """Submit with this machine's model and choices a, b."""
        return self.run("submit", *arguments, "--model", str(self.model), "--choice", "a,b", "--column", "text")

    @property
    def flags(self) -> list[str]:
        return ["--state-dir", str(self.settings.state_dir)]

    @property
    def queue(self) -> Queue:
        return Queue(self.settings, ensure_broker(self.settings))

    def job_ids(self) -> list[str]:
        return Job.list_ids(open_store(self.settings.jobs_root))

    def job(self) -> Job:
        """The only job."""
        return self.open_job("")

    def open_job(self, beginning: str) -> Job:
        """The only job whose id begins so."""
        (job_id,) = (job_id for job_id in self.job_ids() if job_id.startswith(beginning))
        return Job.open(open_store(self.settings.jobs_root), job_id)

    def close(self) -> None:
        stop_broker(self.settings)


def results(job: Job, index: int, label: str = "a", status: RowStatus = RowStatus.OK) -> list[RowResult]:
    """A result for each row of a chunk."""
    chunk = job.chunks[index]
    value, raw, error = (label, label, None) if status is RowStatus.OK else (None, None, "it went wrong")
    return [
        RowResult(row_index=chunk.start_row + i, status=status, value=value, raw=raw, error=error)
        for i in range(chunk.num_rows)
    ]


def commit(job: Job, indices: Sequence[int], **kinds: Any) -> None:
    """Do a worker's work by hand."""
    for index in indices:
        assert job.commit_part(index, results(job, index, **kinds))


class HandWorker(threading.Thread):
    """Serves the machine's only job as a worker would: announces itself and commits every pending chunk."""

    def __init__(self, machine: Machine, **kinds: Any) -> None:
        super().__init__(daemon=True)
        self._machine = machine
        self._kinds = kinds

    def run(self) -> None:
        until(self._machine.job_ids, "a job")
        job = self._machine.job()
        self._machine.queue.announce(job.spec.model.queue, "by-hand")
        for index in job.pending():
            job.commit_part(index, results(job, index, **self._kinds))


def json_lines(result: Result) -> list[dict[str, Any]]:
    """The events of ``--json``."""
    return [json.loads(line) for line in result.stdout.splitlines()]
