"""Parquet to Parquet through Celery, with a model that costs next to nothing: what a row costs at different sizes.

One worker with its engine serves all jobs, one after the other; no row asks what another asks. The rate is that of a
full batch, while chunks are read, validated and committed: starting, draining and finishing are timed beside it.
"""

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from jobs import api
from jobs.broker import stop_broker
from jobs.job import Job
from jobs.local_worker import STOP_TIMEOUT_S, WORKER_COMMAND, worker_environment
from jobs.pace import steady_rate
from ops.bench.labelling import config_directory
from ops.bench.measurement import Run, write_result
from ops.bench.workloads import QWEN3
from schemas.constraints import load_constraint
from schemas.records import ConstraintKind, JobState, RowStatus
from schemas.settings import Settings

TINY = QWEN3 | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 49152,  # the tokenizer's
}
"""A model's config.json: a step takes about as long as the Python around it."""

ENGINE = {"DEVICE": "cpu", "KV_CACHE_GIB": "0.0625"}
"""A cache that is soon full: a page of memory is only taken when it is first written."""

TEMPLATE = "Where does this ticket belong: billing, bug or other?\n{{ text }}\nAnswer: "
CHOICES = '["billing", "bug", "other"]'
TEXT = "Ticket {}: the report shows another total than the table below it. It worked before the update. "
SAMPLE_INTERVAL_S = 0.5
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 2**20


@dataclass(frozen=True)
class PipelineBench:
    """Rows of each job, in order; the first one warms the worker up and is not judged."""

    sizes: tuple[int, ...] = (10_000, 100_000)
    num_warm_up_rows: int = 4096


class Memory(NamedTuple):
    """Resident memory at a moment."""

    at_s: float  # since the benchmark began
    worker_mib: float
    engine_mib: float


def run_pipeline_bench(bench: PipelineBench, settings: Settings) -> Iterator[str]:
    """Yield a line a job and write the JSON; everything lies in a temporary state directory."""
    runs, results = [], []
    with TemporaryDirectory(prefix="nm-") as name, config_directory(TINY) as model:
        root = Path(name)
        state_dir = root / "state"
        settings = settings.model_copy(update={"state_dir": state_dir, "jobs_root": str(state_dir / "jobs")})
        prepared = [_prepare(root, model, num_rows, settings) for num_rows in (bench.num_warm_up_rows, *bench.sizes)]
        try:
            with _worker(settings, prepared[0]) as process, MemoryMeter(process.pid) as meter:
                for each in prepared:
                    job, times = _run(each, settings)
                    if each is prepared[0]:
                        continue
                    result = _result(job, times) | {"memory": _memory(meter, *times)}
                    results.append(result)
                    runs.append(_as_run(job, result))
                    yield _line(result)
        finally:
            stop_broker(settings)
        samples = [sample._asdict() for sample in meter.samples]
    ratio = results[-1]["rows_per_s"] / results[0]["rows_per_s"]
    yield f"rows/s at {bench.sizes[-1]:,} rows over rows/s at {bench.sizes[0]:,}: {ratio:.3f}"
    config = asdict(bench) | {"model": TINY, "engine": ENGINE, "settings": settings.jobs.model_dump(mode="json")}
    facts = {"results": results, "rows_per_s_ratio": ratio, "memory": samples}
    yield f"wrote {write_result('pipeline', config, runs, **facts)}"


def _prepare(root: Path, model: Path, num_rows: int, settings: Settings) -> api.Prepared:
    path = root / f"rows-{num_rows}.parquet"
    texts = [TEXT.format(f"{num_rows}-{number}") + "Please help. " * (number % 8) for number in range(num_rows)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=50_000)
    submission = api.Submission(
        inputs=(str(path),),
        model=str(model),
        load_format="random",
        prompt_template=TEMPLATE,
        chat=False,
        constraint=load_constraint(ConstraintKind.CHOICE, CHOICES),
    )
    return api.prepare(submission, settings)


@contextmanager
def _worker(settings: Settings, prepared: api.Prepared) -> Iterator[subprocess.Popen[bytes]]:
    """A worker as an operator starts it, on the embedded broker."""
    api.connect_queue(settings)
    log_path = Path(settings.state_dir) / "worker.log"
    environment = {
        **os.environ,
        **worker_environment(settings, prepared.spec.model),
        **{f"NIGHTMILL_ENGINE__{name}": value for name, value in ENGINE.items()},
    }
    with log_path.open("ab") as log:
        process = subprocess.Popen(WORKER_COMMAND, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Times(NamedTuple):
    """Of one job, in seconds since 1970."""

    submitted: float
    queued: float
    ended: float


def _run(prepared: api.Prepared, settings: Settings) -> tuple[Job, Times]:
    submitted_s = time.time()
    job = api.submit(prepared, settings)
    queued_s = time.time()
    state = api.wait(job, settings)
    assert state is JobState.DONE, f"{job.job_id}: {state}"
    return job, Times(submitted_s, queued_s, time.time())


def _result(job: Job, times: Times) -> dict[str, Any]:
    """Rows a second while the batch was full, and how long the job's phases took."""
    chunks = job.provenances()
    paces = [chunk.pace for chunk in chunks if chunk.pace]
    rate = steady_rate(paces)
    assert rate is not None
    started_s, committed_s = min(c.started_s for c in chunks), max(c.finished_s for c in chunks)
    return {
        "num_rows": job.num_rows,
        "num_ok": job.counts().get(RowStatus.OK, 0),
        "rows_per_s": rate.completions_per_s,
        "standard_error": rate.error,
        "is_steady": rate.is_steady,
        "submit_s": times.queued - times.submitted,
        "chunks_s": committed_s - started_s,
        "finish_s": times.ended - committed_s,
        "total_s": times.ended - times.submitted,
    }


def _as_run(job: Job, result: dict[str, Any]) -> Run:
    return Run(
        system=f"{job.num_rows} rows",
        repeat=0,
        seconds=result["total_s"],
        num_rows=job.num_rows,
        num_output_tokens=sum(chunk.num_output_tokens for chunk in job.provenances()),
        num_valid=result["num_ok"],
        load_average=os.getloadavg()[0],
    )


def _line(result: dict[str, Any]) -> str:
    memory = result["memory"]
    return (
        f"{result['num_rows']:>9,} rows: {result['rows_per_s']:.0f} rows/s (+- {result['standard_error']:.0%}); "
        f"submit {result['submit_s']:.1f} s, chunks {result['chunks_s']:.1f} s, finish {result['finish_s']:.1f} s; "
        f"worker {memory['worker_first_mib']:.0f} to {memory['worker_last_mib']:.0f} MiB, "
        f"engine {memory['engine_first_mib']:.0f} to {memory['engine_last_mib']:.0f} MiB"
    )


class MemoryMeter(threading.Thread):
    """Samples a worker's and its children's resident memory while it is entered."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="memory", daemon=True)
        self.samples: list[Memory] = []
        self.begun_s = time.time()
        self._pid = pid
        self._stopped = threading.Event()

    def __enter__(self) -> "MemoryMeter":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        """Work until the block is left."""
        while not self._stopped.wait(SAMPLE_INTERVAL_S):
            at_s = time.time() - self.begun_s
            children = sum(map(resident_mib, child_pids(self._pid)))
            self.samples.append(Memory(round(at_s, 2), round(resident_mib(self._pid), 1), round(children, 1)))


def _memory(meter: MemoryMeter, *times: float) -> dict[str, float]:
    """Means over the second and the last tenth of a job's time: at its start something is still being loaded."""
    start_s, end_s = times[0] - meter.begun_s, times[-1] - meter.begun_s
    within = [sample for sample in meter.samples.copy() if start_s <= sample.at_s <= end_s]
    if not within:
        return dict.fromkeys(("worker_first_mib", "worker_last_mib", "engine_first_mib", "engine_last_mib"), 0.0)
    size = max(1, len(within) // 10)
    early, late = within[size : 2 * size] or within, within[-size:]
    means = {"first": early, "last": late}
    return {
        f"{name}_{when}_mib": round(sum(getattr(sample, f"{name}_mib") for sample in some) / len(some), 1)
        for name in ("worker", "engine")
        for when, some in means.items()
    }


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 of one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / MIB
    except (OSError, IndexError):
        return 0.0


def child_pids(pid: int) -> list[int]:
    """The children of all threads of a process."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:  # the thread has ended
            continue
    return found
