"""What a worker's engine and GPUs do, once a second, for the chunks that run meanwhile.

The GPUs are asked through NVML; what it does not tell is None. Knows no jobs.
"""

import functools
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import structlog

from engine.client import EngineClient
from jobs.pace import Pace
from jobs.provenance import Provenance, Sample, count_work
from schemas.records import RowResult
from schemas.settings import EngineSettings

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
NUM_KEPT = 3600  # samples, in all
MAX_CHUNK_SAMPLES = 60
PACKAGES = ("nightmill", "torch", "triton", "transformers", "tokenizers", "xgrammar", "llguidance", "celery", "pyarrow")
GIB = 2**30


class Machine(threading.Thread):
    """Takes samples while the engine runs. Owned by the worker's pool."""

    def __init__(self, client: EngineClient, settings: EngineSettings, start_s: float) -> None:
        super().__init__(name="machine", daemon=True)
        self.worker = f"{socket.gethostname()} {os.getpid()}"
        self._start_s = start_s
        self._client = client
        self._settings = settings.model_dump(mode="json")
        self._gpus = Gpus(client.hello.gpus)
        self._samples: deque[Sample] = deque(maxlen=NUM_KEPT)
        self._stopped = threading.Event()

    def run(self) -> None:
        """Work until ``stop``."""
        while not self._stopped.wait(INTERVAL_S):
            self._samples.append(self._take())
        self._gpus.close()

    def stop(self) -> None:
        """End soon."""
        self._stopped.set()

    def describe_run(self, started_s: float, rows: Iterable[RowResult], pace: Pace | None) -> Provenance:
        """How the rows of a chunk that was begun at ``started_s`` and ends now were computed."""
        now_s, hello = time.time(), self._client.hello
        return Provenance(
            started_s=started_s,
            finished_s=now_s,
            worker=self.worker,
            device=hello.device,
            gpus=self._gpus.names,
            kernels=hello.kernels,
            versions=installed_versions() | self._gpus.versions,
            settings=self._settings,
            samples=thin([s for s in self._samples.copy() if started_s <= s.at_s <= now_s], MAX_CHUNK_SAMPLES),
            start_s=self._start_s,
            pace=pace,
            **count_work(rows),
        )

    def _take(self) -> Sample:
        stats = self._client.stats
        return Sample(
            at_s=round(time.time(), 3),
            num_running=stats.num_running if stats else 0,
            num_waiting=stats.num_waiting if stats else 0,
            **self._gpus.read(),
        )


class Gpus:
    """The GPUs of one engine as NVML sees them; without NVML there is nothing to read."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.names: tuple[str, ...] = ()
        self.versions: dict[str, str] = {}
        self._handles: list[Any] = []
        if not uuids:
            return
        import pynvml

        try:
            pynvml.nvmlInit()
            self._handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            self.names = tuple(pynvml.nvmlDeviceGetName(handle) for handle in self._handles)
            self.versions = {"NVIDIA driver": pynvml.nvmlSystemGetDriverVersion()}
        except pynvml.NVMLError as error:
            log.warning("gpu_is_not_sampled", reason=str(error))

    def read(self) -> dict[str, float | None]:
        """The GPU fields of a Sample."""
        if not self._handles:
            return {}
        import pynvml

        readings = {
            "gpu_share": [self._ask(pynvml.nvmlDeviceGetUtilizationRates, handle) for handle in self._handles],
            "memory_gib": [self._ask(pynvml.nvmlDeviceGetMemoryInfo, handle) for handle in self._handles],
            "power_w": [self._ask(pynvml.nvmlDeviceGetPowerUsage, handle) for handle in self._handles],
            "energy_j": [self._ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in self._handles],
        }
        units = {
            "gpu_share": lambda found: found.gpu / 100 / len(self._handles),
            "memory_gib": lambda found: found.used / GIB,
            "power_w": lambda found: found / 1000,
            "energy_j": lambda found: found / 1000,
        }
        return {
            name: None if None in found else round(sum(map(units[name], found)), 3) for name, found in readings.items()
        }

    def close(self) -> None:
        """Let NVML go."""
        if self._handles:
            import pynvml

            pynvml.nvmlShutdown()

    def _ask(self, question: Any, handle: Any) -> Any:
        """The answer, None if this GPU has none."""
        import pynvml

        try:
            return question(handle)
        except pynvml.NVMLError:
            return None


def thin(samples: Sequence[Sample], max_number: int) -> tuple[Sample, ...]:
    """At most ``max_number`` of the samples, evenly spread, the first and the last among them."""
    if len(samples) <= max_number:
        return tuple(samples)
    step = (len(samples) - 1) / (max_number - 1)
    return tuple(samples[round(number * step)] for number in range(max_number))


@functools.cache
def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter for an answer or for its speed."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
