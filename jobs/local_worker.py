"""The worker process of the embedded default: started for a run, restarted a bounded number of times, stopped after it.

Knows the worker's command line and environment, not its code.
"""

import ctypes
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from jobs.queue import redact
from schemas.errors import EngineError
from schemas.records import ModelRef
from schemas.settings import Settings, default_state_dir

WORKER_COMMAND = (sys.executable, "-m", "celery", "-A", "worker", "worker", "--without-mingle", "--without-gossip")
"""Alone on its machine it has nobody to ask what was revoked, which would take a second at each connect."""

MAX_DEATHS = 4
PERMANENT_EXIT_CODE = 2  # of a worker whose settings or model are refused: another start would end alike
STOP_TIMEOUT_S = 15.0
PR_SET_PDEATHSIG = 1
LOG_TAIL_LINES = 8
MAX_LOG_LINE_CHARS = 300


class LocalWorker:
    """One worker process at a time; owned by the waiting loop."""

    def __init__(self, settings: Settings, model: ModelRef, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._command = command
        self._environment = worker_environment(settings, model)
        self._process: subprocess.Popen[bytes] | None = None
        self._num_deaths = 0
        self.log_path = Path(settings.state_dir).absolute() / "logs" / f"worker-{model.queue}-{os.getpid()}.log"

    @property
    def has_died(self) -> bool:
        """Whether a worker was started and ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def is_running(self) -> bool:
        """Whether a worker that this object started is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the worker in a session of its own, so that Ctrl-C in the terminal reaches only the waiting verb."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent(),  # noqa: PLW1509 - a bare system call, which takes no lock
            )

    def restart(self) -> None:
        """Start it again after a death.

        Raises EngineError with the cause and the log's tail if that is useless: it refused its settings or model, or it
        has died ``MAX_DEATHS`` times since the last progress.
        """
        self._num_deaths += 1
        code = None if self._process is None else self._process.poll()
        if code == PERMANENT_EXIT_CODE or self._num_deaths >= MAX_DEATHS:
            raise EngineError(self._describe_death(code))
        self.start()

    def note_progress(self) -> None:
        """Forget earlier deaths: it got something done since."""
        self._num_deaths = 0

    def _describe_death(self, code: int | None) -> str:
        lines = self._log_tail()
        cause = next(filter(None, map(_error_in, reversed(lines))), None)
        headline = f"the worker cannot go on: {cause}" if cause else f"the worker died (exit code {code})"
        tail = "\n".join(f"  {line[:MAX_LOG_LINE_CHARS]}" for line in lines if line)
        return f"{headline}\nits log {self.log_path} ends with\n{tail}"

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


def _end_with_parent() -> Callable[[], object] | None:
    """What the child does first: ask Linux for a SIGQUIT when we die, or kill -9 of a submit would leave a worker."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    return None if prctl is None else functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGQUIT)


def _error_in(line: str) -> str | None:
    """The reason in a structured log line of level error."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_error = isinstance(event, dict) and event.get("level") == "error"
    return str(event["reason"]) if is_error and event.get("reason") else None


def worker_environment(settings: Settings, model: ModelRef) -> dict[str, str]:
    """The variables that make a worker serve ``model`` from the same state directory and jobs root."""
    environment = {
        "NIGHTMILL_STATE_DIR": str(Path(settings.state_dir).absolute()),
        "NIGHTMILL_JOBS_ROOT": settings.jobs_root,
        **model_environment(model),
    }
    for name in ("broker_url", "broker_password_file", "broker_ca_file"):
        if (value := getattr(settings, name)) is not None:
            environment[f"NIGHTMILL_{name.upper()}"] = str(value)
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
        "NIGHTMILL_WORKER__DETERMINISTIC": str(model.deterministic).lower(),
    }
    return environment if model.revision is None else {**environment, "NIGHTMILL_WORKER__REVISION": model.revision}


def worker_command(settings: Settings, model: ModelRef) -> str:
    """The shell line that starts a worker for ``model``: variables that differ from the defaults, then the command."""
    state_dir = default_state_dir().absolute()
    defaults = {
        "NIGHTMILL_STATE_DIR": str(state_dir),
        "NIGHTMILL_JOBS_ROOT": str(Path(settings.state_dir).absolute() / "jobs"),
        **model_environment(ModelRef(name="smollm2", digest=model.digest)),
    }
    if model.name != "smollm2":
        del defaults["NIGHTMILL_WORKER__DTYPE"]  # a worker's default is the checkpoint's own, which may be another
    wanted = worker_environment(settings, model)
    changed = [f"{key}={shlex.quote(redact(value))}" for key, value in wanted.items() if defaults.get(key) != value]
    return " ".join([*changed, "celery -A worker worker"])
