"""A worker that starts a fake engine, prints its pid, submits the text it was given and waits to be killed."""

import sys
import threading
from pathlib import Path

from engine.client import EngineClient
from schemas.log import configure_logging
from schemas.records import ModelRef, Request
from schemas.settings import EngineSettings

if __name__ == "__main__":
    configure_logging()  # standard output is for the pid
    command = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
    client = EngineClient(ModelRef(name="fake", digest="0"), EngineSettings(), command=command)
    client.start()
    print(client.pid, flush=True)
    client.submit(Request(request_id="1", text=sys.argv[1]))
    threading.Event().wait()
