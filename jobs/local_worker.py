"""The worker process of the embedded default: started for a run, restarted a bounded number of times, stopped after it.

Knows the worker's command line and environment, not its code.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path

from schemas.errors import EngineError
from schemas.records import ModelRef
from schemas.settings import Settings

MAX_STARTS = 4
STOP_TIMEOUT_S = 15.0
LOG_TAIL_LINES = 15


class LocalWorker:
    """One worker process at a time; owned by the waiting loop."""

    def __init__(self, settings: Settings, model: ModelRef) -> None:
        self._environment = worker_environment(settings, model)
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.log_path = Path(settings.state_dir).absolute() / "logs" / f"worker-{model.queue}-{os.getpid()}.log"

    @property
    def pid(self) -> int | None:
        """Process id of the worker that was started last, None before the first start."""
        return None if self._process is None else self._process.pid

    def is_running(self) -> bool:
        """Whether a worker that this object started is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the worker in a session of its own, so that Ctrl-C in the terminal reaches only the waiting verb.

        Raises EngineError with the log's tail when it has already died ``MAX_STARTS`` times.
        """
        if self.num_starts >= MAX_STARTS:
            raise EngineError(self.describe_death())
        self.num_starts += 1
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "worker", "worker"],
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def describe_death(self) -> str:
        """Say how the worker ended, and its last words."""
        code = None if self._process is None else self._process.poll()
        tail = "\n".join(f"  {line}" for line in self._log_tail())
        return f"the worker died {self.num_starts} times (exit code {code}); its log {self.log_path} ends with\n{tail}"

    def stop(self) -> None:
        """Give running chunks back to the queue and end the process; killed if that takes too long."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(
            signal.SIGQUIT
        )  # cold shutdown: cancels and requeues, where SIGTERM would finish the chunks
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # the engine sees the end of its pipe and follows
            process.wait()

    def _log_tail(self) -> list[str]:
        try:
            with self.log_path.open(errors="replace") as log:
                return [line.rstrip() for line in deque(log, LOG_TAIL_LINES)]
        except OSError:
            return []


def worker_environment(settings: Settings, model: ModelRef) -> dict[str, str]:
    """The variables that make a worker serve ``model`` from the same state directory and jobs root."""
    environment = {
        "NIGHTMILL_STATE_DIR": str(Path(settings.state_dir).absolute()),
        "NIGHTMILL_JOBS_ROOT": settings.jobs_root,
        **model_environment(model),
    }
    if settings.broker_url is not None:
        environment["NIGHTMILL_BROKER_URL"] = settings.broker_url
    return environment


def model_environment(model: ModelRef) -> dict[str, str]:
    """The variables of ``WorkerSettings`` that name the model."""
    path = Path(model.name).expanduser()
    environment = {
        "NIGHTMILL_WORKER__MODEL": str(path.absolute()) if path.exists() else model.name,
        "NIGHTMILL_WORKER__DTYPE": model.dtype,
        "NIGHTMILL_WORKER__QUANTIZATION": model.quantization,
        "NIGHTMILL_WORKER__LOAD_FORMAT": model.load_format,
        "NIGHTMILL_WORKER__MAX_MODEL_LEN": str(model.max_model_len),
    }
    return environment if model.revision is None else {**environment, "NIGHTMILL_WORKER__REVISION": model.revision}


def worker_command(settings: Settings, model: ModelRef) -> str:
    """The shell line that starts a worker for ``model``: what differs from the defaults, then the command."""
    defaults = worker_environment(
        Settings.model_construct(), ModelRef(name="smollm2", digest=model.digest, dtype="float32")
    )
    wanted = worker_environment(settings, model)
    changed = [f"{key}={shlex.quote(value)}" for key, value in wanted.items() if defaults.get(key) != value]
    return " ".join([*changed, "celery -A worker worker"])
