"""A peer that runs in a Python of its own, one process for each pass: a used one would find its prompts in its cache.

The other side of the pipe is ops/bench/peer_process.py. Knows no clock.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ops.bench.systems import Answer, System
from ops.bench.tickets import TicketWorkload
from schemas.errors import NightmillError

SCRIPT = Path(__file__).with_name("peer_process.py")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class PeerAbsentError(NightmillError):
    """A peer that this machine cannot run; the message is the last thing that it said."""


class PeerProcess(System):
    """The peer behind its pipe."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._requests, self._answers = process.stdin, process.stdout
        self.name: str = self._receive()["system"]

    def _generate(
        self, prompts: tuple[tuple[int, ...], ...], workload: TicketWorkload, max_tokens: int
    ) -> list[Answer]:
        request = {"prompts": prompts, "schema": workload.constraint.source, "max_tokens": max_tokens}
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return [
            Answer(text, len(token_ids), "stop" if len(token_ids) < max_tokens else "length")
            for token_ids, text in self._receive()
        ]

    def _receive(self) -> Any:
        if not (line := self._answers.readline()):
            raise EOFError
        return json.loads(line)


@contextmanager
def peer_process(python: Path, directory: Path, num_threads: int) -> Iterator[PeerProcess]:
    """Start the peer in its own ``python``. Raises PeerAbsentError where it does not start, or dies."""
    command = [str(python), "-P", str(SCRIPT), str(directory), str(num_threads)]
    with TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | ENVIRONMENT,
            )
        except OSError as error:
            raise PeerAbsentError(f"{python}: {error.strerror}") from error
        with process:  # waits for the end, which the closed pipe is the reason for
            try:
                yield PeerProcess(process)
            except (EOFError, BrokenPipeError) as error:
                errors.seek(0)
                said = errors.read().strip().splitlines() or [f"exit code {process.wait()}"]
                raise PeerAbsentError(said[-1]) from error
