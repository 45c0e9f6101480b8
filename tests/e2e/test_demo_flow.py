"""The whole way on the embedded default: real broker, real worker, real engine, a tiny random model."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.broker import broker_status, ensure_broker, stop_broker
from jobs.job import Job
from jobs.local_worker import worker_environment
from jobs.store import open_store
from schemas.constraints import load_constraint, make_validator
from schemas.model_files import model_ref
from schemas.records import ConstraintKind
from schemas.settings import Settings
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 240.0
NUM_ROWS = 40
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"route": {"enum": ["billing", "bug", "other"]}},
        "required": ["route"],
        "additionalProperties": False,
    }
)
OPTIONS = ("--column", "text", "--gold", "route", "--max-tokens", "64", "--chunk-rows", "5", "--max-model-len", "512")


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until ``condition()`` is truthy and return it."""
    end_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {DEADLINE_S} s in vain for: {what}"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path, "qwen3")
    return path


class Machine:
    """One state directory; verbs are processes, as users start them."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path = path
        self.model = model
        self.settings = Settings(state_dir=path / "state")
        self.data = str(path / "tickets.parquet")
        rows = range(NUM_ROWS)
        # Row 7 has no prompt: its status must say so, and nothing may shift.
        texts = [None if i == 7 else f"ticket {i}: I was charged {i} times" for i in rows]
        routes = [("billing", "bug", "other")[i % 3] for i in rows]
        pq.write_table(pa.table({"id": list(rows), "text": texts, "route": routes}), self.data, row_group_size=15)
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NIGHTMILL_STATE_DIR": str(self.settings.state_dir),
            "NIGHTMILL_ENGINE__KV_CACHE_GIB": "0.1",
            "NIGHTMILL_ENGINE__MAX_NUM_SEQS": "8",
            "NIGHTMILL_WORKER__VISIBILITY_TIMEOUT_S": "5",
            "NIGHTMILL_WORKER__RECONCILE_INTERVAL_S": "1",
            "NIGHTMILL_JOBS__REPORT": "false",
        }
        self._processes: list[subprocess.Popen[str]] = []

    def start(self, module: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start ``python -m MODULE``; its stderr goes to a file."""
        with (self.path / "stderr").open("a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._processes.append(process)
        return process

    def start_submit(self, *options: str) -> "subprocess.Popen[str]":
        return self.start("jobs.submit", self.data, "--schema", SCHEMA, "--model", str(self.model), *OPTIONS, *options)

    def finish(self, process: "subprocess.Popen[str]") -> tuple[int, str]:
        """Exit code and stdout."""
        stdout, _ = process.communicate(timeout=DEADLINE_S)
        return process.returncode, stdout

    @property
    def told(self) -> str:
        """What verbs wrote to stderr."""
        return (self.path / "stderr").read_text()

    def start_worker(self, name: str) -> "subprocess.Popen[str]":
        """A worker as on a second terminal."""
        self.environment |= worker_environment(self.settings, self.model_ref())
        return self.start("celery", "-A", "worker", "worker", "-n", f"{name}@%h")

    def model_ref(self) -> Any:
        return model_ref(str(self.model), max_model_len=512)

    def job(self) -> Job:
        store = open_store(self.settings.jobs_root)
        return Job.open(store, Job.list_ids(store)[0])

    def processes(self, word: str) -> list[psutil.Process]:
        """This machine's running processes whose command line holds ``word``."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get("NIGHTMILL_STATE_DIR") == str(self.settings.state_dir)
                if is_ours and any(word in part for part in process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def close(self) -> None:
        for process in [*self.processes("celery"), *self.processes("engine.rank"), *self.processes("jobs.")]:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        stop_broker(self.settings)


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("machine"), model)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[tuple[Machine, int, str]]:
    """A machine on which a submit alone has labelled everything and written a report, its exit code and its stdout."""
    machine = Machine(tmp_path_factory.mktemp("machine"), model)
    machine.environment["NIGHTMILL_JOBS__REPORT"] = "true"
    try:
        yield machine, *machine.finish(machine.start_submit())
    finally:
        machine.close()


def read_output(machine: Machine) -> list[dict[str, Any]]:
    success = machine.job().success()
    assert success is not None, machine.told
    (output,) = success.outputs
    rows: list[dict[str, Any]] = pq.read_table(output.uri).to_pylist()
    return rows


def check_rows(machine: Machine) -> list[tuple[Any, str]]:
    """Every row once, in order, with a status; every ok one valid. Returns labels and statuses."""
    rows = read_output(machine)
    validator = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, SCHEMA))
    assert [row["id"] for row in rows] == list(range(NUM_ROWS))
    assert rows[7]["label_status"] == "input_error"
    for row in rows:
        if row["label_status"] == "ok":
            value, problem = validator.check(row["label_raw"])
            assert (value, problem) == (row["label"], None)
    assert sum(row["label_status"] == "ok" for row in rows) > NUM_ROWS // 2
    return [(row["label"], row["label_status"]) for row in rows]


def test_submit_alone_labels_everything_and_stops_what_it_started(undisturbed: tuple[Machine, int, str]) -> None:
    machine, code, stdout = undisturbed
    assert code == 3, machine.told  # row 7
    check_rows(machine)
    assert "report.html" in machine.job().store.list()
    assert "agreement with route" in stdout
    assert "1 input_error" in stdout
    assert machine.processes("celery") == []
    assert machine.processes("engine.rank") == []

    code, stdout = machine.finish(machine.start_submit("--json"))
    assert (code, [json.loads(line)["event"] for line in stdout.splitlines()]) == (3, ["summary"])
    code, stdout = machine.finish(machine.start("jobs.verify", "tickets"))
    assert code == 0, stdout


def test_real_queries_with_77_labels_come_back_in_order_and_valid(machine: Machine, shared_data: Path) -> None:
    source = pq.read_table(shared_data / "banking77.parquet")
    categories = sorted(set(source["category"].to_pylist()))
    schema = json.dumps({**json.loads(SCHEMA), "properties": {"route": {"enum": categories}}})
    options = ["--column", "text", "--limit", "256", "--system", "", "--max-model-len", "1024", "--chunk-rows", "64"]
    data = str(shared_data / "banking77.parquet")
    submit = machine.start("jobs.submit", data, "--schema", schema, "--model", str(machine.model), *options)
    assert machine.finish(submit)[0] == 0, machine.told
    rows = read_output(machine)
    assert [{name: row[name] for name in source.column_names} for row in rows] == source.slice(0, 256).to_pylist()
    validator = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, schema))
    assert [validator.check(row["label_raw"]) for row in rows] == [(row["label"], None) for row in rows]
    assert {row["label_status"] for row in rows} == {"ok"}


def test_two_workers_give_the_labels_of_the_embedded_run(
    machine: Machine, undisturbed: tuple[Machine, int, str]
) -> None:
    together, (alone, _, _) = machine, undisturbed
    together.environment["NIGHTMILL_BROKER_URL"] = ensure_broker(together.settings)
    workers = [together.start_worker("one"), together.start_worker("two")]
    assert together.finish(together.start_submit("--wait"))[0] == 3, together.told
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
        assert together.finish(worker)[0] == 0
    assert check_rows(together) == check_rows(alone)


def test_a_worker_that_is_there_is_used_and_left_running(machine: Machine) -> None:
    ensure_broker(machine.settings)
    machine.start_worker("mine")
    until(lambda: machine.processes("engine.rank"), "the worker's engine")
    assert machine.finish(machine.start_submit())[0] == 3, machine.told
    assert "started a worker" not in machine.told
    assert machine.processes("celery") != []
    check_rows(machine)


def kill_engine(machine: Machine) -> None:
    for process in machine.processes("engine.rank"):
        process.kill()


def kill_worker(machine: Machine) -> None:
    for process in machine.processes("celery"):
        process.kill()


def kill_broker(machine: Machine) -> None:
    pid = broker_status(machine.settings).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_engine, kill_worker, kill_broker])
def test_a_kill_in_mid_job_loses_and_changes_no_row(
    machine: Machine, kill: Callable[[Machine], None], undisturbed: tuple[Machine, int, str]
) -> None:
    submit = machine.start_submit()
    until(lambda: machine.told and _num_parts(machine) >= 1, "the first part")
    kill(machine)
    assert machine.finish(submit)[0] == 3, machine.told
    assert check_rows(machine) == check_rows(undisturbed[0])


def test_an_interrupted_submit_is_resumed_without_doing_anything_twice(machine: Machine) -> None:
    submit = machine.start_submit()
    until(lambda: _num_parts(machine) >= 1, "the first part")
    submit.send_signal(signal.SIGINT)
    assert machine.finish(submit)[0] == 130
    assert machine.processes("celery") == []
    job = machine.job()
    before = {path: path.stat().st_mtime_ns for path in Path(job.store.locate("parts")).iterdir()}
    stop_broker(machine.settings)
    assert machine.finish(machine.start("jobs.resume", job.job_id))[0] == 3, machine.told
    after = {path: path.stat().st_mtime_ns for path in Path(job.store.locate("parts")).iterdir()}
    assert before.items() <= after.items()
    check_rows(machine)


def _num_parts(machine: Machine) -> int:
    store = open_store(machine.settings.jobs_root)
    return len(machine.job().parts()) if Job.list_ids(store) else 0
