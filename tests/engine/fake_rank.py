"""A rank with a fake engine, run as a script: what it does is written in the model's name and the requests' texts.

Texts: ``kill``, ``raise``, ``hang`` do that each time; ``kill-once:FILE`` and ``hang-once:FILE`` the first time only;
``until:FILE`` runs until the file exists; anything else is answered with a text that depends on text, seed and
constraint. One token a step for each sequence; ``FAKE_STEP_S`` is how long one takes, the file ``FAKE_ANSWERS`` gets a
line for each answer.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from engine.rank import main
from engine.stats import EngineStats
from schemas.errors import ModelError, SettingsError
from schemas.records import Completion, Constraint, FinishReason, ModelRef, Request
from schemas.settings import EngineSettings

STEP_S = float(os.environ.get("FAKE_STEP_S", "0.001"))
ANSWERS = os.environ.get("FAKE_ANSWERS")


class FakeEngine:
    max_model_len = 100
    device = "fake"
    gpus = ()
    choices = (SimpleNamespace(operation="linear", backend="fake", reason="test"),)

    def __init__(self, model: ModelRef, settings: EngineSettings, rank: int, rendezvous: str) -> None:
        self.credits = settings.max_num_seqs or 16
        self.stats = EngineStats()
        self._constraints: dict[str, Constraint] = {}
        self._running: dict[str, tuple[Request, int]] = {}
        self._done: list[Completion] = []
        print("noise of a library on standard output")
        if settings.device != "auto":
            raise SettingsError(f"engine.device {settings.device!r} cannot be used")
        match model.name.partition(":"):
            case ("bad", _, text):
                raise ModelError(text)
            case ("oom", _, _):
                raise MemoryError("out of memory: tried to allocate 900 GiB")
            case ("exit", _, status):
                os._exit(int(status))
            case ("die-loading", _, _):
                os.kill(os.getpid(), signal.SIGKILL)
            case ("die-loading-once", _, path) if _first_time(path):
                os.kill(os.getpid(), signal.SIGKILL)
            case ("load-for-ever", _, path):
                Path(path).write_text(str(os.getpid()))
                threading.Event().wait()

    def add_constraint(self, constraint: Constraint) -> None:
        self._constraints[constraint.key] = constraint

    def tokenize(self, request: Request) -> str:
        return request.request_id

    def add(self, request: Request, prompt: object = None) -> None:
        assert prompt == request.request_id, "prompts are tokenised as they arrive"
        if request.constraint_key and request.constraint_key not in self._constraints:
            raise KeyError(f"unknown constraint {request.constraint_key}")
        assert len(self._running) < self.credits, "more requests than credits"
        self._running[request.request_id] = (request, request.sampling.budget)

    def cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self._running.pop(request_id, None):
                self._done.append(Completion(request_id=request_id, finish_reason=FinishReason.CANCELLED))

    def hear(self, num_batches: int) -> None:
        pass

    def beat(self) -> None:
        pass

    def has_work(self) -> bool:
        return bool(self._running or self._done)

    def step(self) -> list[Completion]:
        time.sleep(STEP_S)
        self.stats.num_steps += 1
        self.stats.num_running = len(self._running)
        for request_id, (request, left) in list(self._running.items()):
            _misbehave(request.text or "")
            self._running[request_id] = (request, left - 1)
            if left <= 1 and _may_end(request.text or ""):
                del self._running[request_id]
                self._done.append(self._answer(request))
        done, self._done = self._done, []
        return done

    def _answer(self, request: Request) -> Completion:
        constraint = self._constraints[request.constraint_key].source if request.constraint_key else None
        text = f"{request.text}|{request.seed}|{constraint}"
        if ANSWERS:
            with open(ANSWERS, "a") as file:
                file.write(f"{request.text}\n")
        return Completion(request_id=request.request_id, finish_reason=FinishReason.STOP, text=text, token_ids=(1, 2))


def _misbehave(text: str) -> None:
    action, _, path = text.partition(":")
    if action in ("kill-once", "hang-once") and not _first_time(path):
        return
    if action.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if action.startswith("hang"):
        threading.Event().wait()


def _may_end(text: str) -> bool:
    action, _, path = text.partition(":")
    return action != "until" or Path(path).exists()


def _first_time(path: str) -> bool:
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), FakeEngine)
