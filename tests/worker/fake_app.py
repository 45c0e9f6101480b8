"""The worker's own app with a fake engine behind its real client, and with faults at named hops.

Used as ``celery -A tests.worker.fake_app worker``. ``LAB_DIR`` gets one line per hop in ``events``; a file
``fault-HOP-CHUNK`` in it says how that hop misbehaves; ``never-loads`` and ``cannot-load`` make the engine do that.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import structlog

import worker.tasks
from engine.client import EngineClient
from schemas.settings import Settings
from worker.celery import make_app

LAB = Path(os.environ["LAB_DIR"])
NEVER_LOADS = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
while (data := sock.recv(10**6)) and b"Stop" not in data: pass
"""
FAKE_RANK = [sys.executable, str(Path(__file__).parent.parent / "engine" / "fake_rank.py")]


def make_client(*args: Any, **kwargs: Any) -> EngineClient:
    codes = {"never-loads": NEVER_LOADS, "cannot-load": "raise SystemExit(3)"}
    code = next((code for name, code in codes.items() if (LAB / name).exists()), None)
    return EngineClient(*args, command=[sys.executable, "-c", code] if code else FAKE_RANK, **kwargs)


def on_hop(hop: str) -> None:
    context = structlog.contextvars.get_contextvars()
    event = {"hop": hop, "job": context["job"], "chunk": context["chunk"], "pid": os.getpid(), "at_s": time.time()}
    with (LAB / "events").open("a") as file:
        file.write(json.dumps(event) + "\n")
    fault = LAB / f"fault-{hop}-{context['chunk']}"
    if fault.exists():
        misbehave(fault.read_text(), fault)


def misbehave(how: str, fault: Path) -> None:
    match how:
        case "kill":
            fault.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill-always":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            fault.unlink()
            raise SystemExit(3)
        case "raise-always":
            raise RuntimeError("poison")
        case "full-disk":
            fault.unlink()
            raise OSError(28, "No space left on device")


worker.tasks.REST_S = float(os.environ.get("LAB_REST_S", worker.tasks.REST_S))
app = make_app(Settings.load(), make_client, on_hop)
