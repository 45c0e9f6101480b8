"""Real workers, a real broker and a fake engine in one temporary directory; the tests kill what they like."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from jobs.broker import broker_status, broker_url, ensure_broker, stop_broker
from jobs.job import Job
from jobs.plan import make_chunks
from jobs.queue import PREFIX, UNACKED_INDEX_KEY, UNACKED_KEY, Queue, connect
from jobs.source import scan_inputs
from jobs.store import open_store
from jobs.thresholds import Thresholds
from schemas.model_files import model_ref
from schemas.records import JobSpec, ModelRef, Priority, Sampling
from schemas.settings import Settings
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENS_PER_S = 800
"""About what the fake engine does: a millisecond's sleep per token, and some work."""
DEADLINE_S = 40.0


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Wait until ``condition()`` is truthy and return it."""
    return wait_until(condition, what, deadline_s)


class Worker:
    """A worker process of the lab's app."""

    def __init__(self, lab: "Lab", name: str, arguments: Iterable[str], environment: dict[str, str]) -> None:
        self.log_path = lab.path / f"{name}.log"
        command = [sys.executable, "-m", "celery", "-A", lab.app, "worker", "-n", f"{name}@lab"]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                [*command, "-l", "INFO", *lab.options, *arguments],
                env=lab.environment | environment,
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What this process has written."""
        return self.log_path.read_bytes()[self._log_start :].decode(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> "Worker":
        until(lambda: "lab ready." in self.log or not self.is_alive, "the worker to be ready")
        assert self.is_alive, self.log
        return self

    def engine_pids(self) -> set[int]:
        children = psutil.Process(self.pid).children()
        names = ("fake_rank", "engine.rank")
        return {child.pid for child in children if any(name in word for word in child.cmdline() for name in names)}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, deadline_s: float = 20.0) -> int:
        """The exit code; killed, and a failure, when it does not end."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the worker did not end within {deadline_s} s:\n{self.log}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Lab:
    """One state directory with everything in it."""

    app = "tests.worker.fake_app"
    options: tuple[str, ...] = ("--without-mingle", "--without-gossip")
    """They cost a second at each start and reconnect; the nights of tests.faults leave them on."""

    def __init__(self, path: Path, settings: dict[str, Any] | None = None, **worker: Any) -> None:
        """``settings`` are of this lab's Settings beside the worker's, such as ``broker_url``."""
        self.path = path
        model = path / "model"
        if not model.exists():
            model.mkdir()
            (model / "config.json").write_text("{}")
        options = {
            "model": str(model),
            "visibility_timeout_s": 3.0,
            "reconcile_interval_s": 600.0,
            "drain_s": 30.0,
        } | worker
        others = {"state_dir": path / "state", **(settings or {})}
        self.settings = Settings(worker=options, **others)  # type: ignore[arg-type]
        self.environment = {
            **os.environ,
            "LAB_DIR": str(path),
            "NIGHTMILL_JOBS__REPORT": "false",  # takes a second of each job
            **{f"NIGHTMILL_{name.upper()}": str(value) for name, value in others.items()},
            **{f"NIGHTMILL_WORKER__{name.upper()}": str(value) for name, value in options.items()},
        }
        self.url = ensure_broker(self.settings)
        self.redis = connect(self.url)
        self.queue = Queue(self.settings, self.url)
        self.store = open_store(self.settings.jobs_root)
        self.workers: list[Worker] = []

    def close(self) -> None:
        for worker in self.workers:
            if worker.is_alive:
                worker.kill()
        self.redis.close()
        if self.settings.broker_url is None:
            stop_broker(self.settings)

    @property
    def model(self) -> ModelRef:
        return model_ref(self.settings.worker.model)

    def other_model(self) -> ModelRef:
        """A model that no worker of this lab serves."""
        return msgspec.structs.replace(self.model, digest="f" * 16)

    def worker(self, name: str = "w1", *arguments: str, is_ready: bool = True, **environment: str) -> Worker:
        worker = Worker(self, name, arguments, environment)
        self.workers.append(worker)
        return worker.wait_ready() if is_ready else worker

    def job(
        self,
        num_chunks: int,
        seconds: float = 0.01,
        name: str = "job",
        model: ModelRef | None = None,
        *,
        chunk_rows: int = 1,
        output: Path | None = None,
        priority: Priority = Priority.INTERACTIVE,
        thresholds: Thresholds | None = None,
        text: Callable[[int], str] = "row {}".format,
        before_start: Callable[[Job], object] = lambda job: None,
        **spec_fields: Any,
    ) -> Job:
        """A job of rows that take about so many seconds each; not queued yet."""
        source = self.path / f"{name}.parquet"
        pq.write_table(pa.table({"text": list(map(text, range(num_chunks * chunk_rows)))}), source)
        inputs = scan_inputs([str(source)])
        spec = JobSpec(
            name=name,
            inputs=inputs.files,
            model=model or self.model,
            chat=False,
            **{
                "prompt_column": "text",
                "sampling": Sampling(max_tokens=max(1, int(seconds * TOKENS_PER_S))),
                **spec_fields,
            },
        )
        chunks = make_chunks(inputs.files, chunk_rows)
        outside: dict[str, Any] = {"priority": priority, "thresholds": thresholds, "before_start": before_start}
        output_uri = None if output is None else str(output)
        return Job.create(self.store, spec, chunks, input_schema=inputs.schema, output=output_uri, **outside)

    def start_job(self, num_chunks: int, seconds: float = 0.01, name: str = "job", **options: Any) -> Job:
        job = self.job(num_chunks, seconds, name, **options)
        self.queue.enqueue(job, job.pending())
        return job

    @property
    def gate(self) -> Path:
        """Rows of a gated job run until this file exists."""
        return self.path / "gate"

    def start_gated_job(self, num_chunks: int, name: str = "job", **options: Any) -> Job:
        return self.start_job(num_chunks, name=name, text=lambda row: f"until:{self.gate}", **options)

    def fault(self, hop: str, chunk: int, how: str) -> None:
        (self.path / f"fault-{hop}-{chunk}").write_text(how)

    def events(self, hop: str) -> list[dict[str, Any]]:
        """What workers reported for a hop, in order."""
        try:
            lines = (self.path / "events").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for line in lines if (event := json.loads(line))["hop"] == hop]

    def count(self, hop: str) -> Counter[int]:
        """How often each chunk passed a hop."""
        return Counter(event["chunk"] for event in self.events(hop))

    def leftovers(self) -> dict[str, int]:
        """Messages in the queue, and messages that count as held by some worker."""
        return {
            "queued": self.queue.depth(self.model.queue),
            "unacked": int(self.redis.hlen(UNACKED_KEY)),
            "index": int(self.redis.zcard(UNACKED_INDEX_KEY)),
        }

    def wait_clean(self) -> None:
        until(lambda: not any(self.leftovers().values()), "no message to be left over")

    def wait_done(self, job: Job, deadline_s: float = DEADLINE_S) -> None:
        until(lambda: not job.pending(), f"chunks {job.pending()} to be committed", deadline_s)

    def kill_broker(self) -> None:
        pid = broker_status(self.settings).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(pid) or broker_status(self.settings).pid is None, "the broker to die")

    def start_broker(self) -> None:
        assert ensure_broker(self.settings) == self.url == broker_url(self.settings)

    def queue_key(self) -> str:
        return PREFIX + self.model.queue
