import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs.local_worker import worker_command, worker_environment
from schemas.records import ModelRef
from schemas.settings import Settings
from tests.jobs.verbs import until


def worker_sees(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Settings:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Settings.load()


def test_a_worker_serves_the_jobs_model_from_the_same_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, broker_url="redis://host/1")
    model = ModelRef(
        name="org/model", digest="d", dtype="bfloat16", revision="main", max_model_len=777, deterministic=True
    )
    found = worker_sees(monkeypatch, worker_environment(settings, model))
    assert (found.state_dir, found.jobs_root, found.broker_url) == (tmp_path, settings.jobs_root, settings.broker_url)
    worker = found.worker
    assert (worker.model, worker.dtype, worker.revision) == ("org/model", "bfloat16", "main")
    assert (worker.max_model_len, worker.deterministic) == (777, True)


def test_local_models_are_named_by_their_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    environment = worker_environment(Settings(), ModelRef(name="model", digest="d"))
    assert environment["NIGHTMILL_WORKER__MODEL"] == str(tmp_path / "model")


def test_the_shown_command_is_short_by_default() -> None:
    assert worker_command(Settings(), ModelRef(name="smollm2", digest="d")) == "celery -A worker worker"


def test_the_shown_command_is_what_the_worker_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "a b", jobs_root="s3://bucket/jobs")
    model = ModelRef(name="org/model", digest="d", dtype="float32")
    *variables, _, _, _, _ = shlex.split(worker_command(settings, model))
    found = worker_sees(monkeypatch, dict(variable.split("=", 1) for variable in variables))
    assert (found.state_dir, found.jobs_root) == (tmp_path / "a b", "s3://bucket/jobs")
    assert (found.worker.model, found.worker.dtype) == ("org/model", "float32")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_a_worker_ends_when_its_submit_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from jobs.local_worker import LocalWorker
from schemas.records import ModelRef
from schemas.settings import Settings
stays = (sys.executable, "-c", "import signal; signal.pause()")
worker = LocalWorker(Settings(state_dir={str(tmp_path)!r}), ModelRef(name="model", digest="d"), stays)
worker.start()
print(worker._process.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as submit:
        assert submit.stdout is not None
        worker = psutil.Process(int(submit.stdout.readline()))
        assert worker.is_running()
        submit.kill()
    until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, "the worker to follow")
