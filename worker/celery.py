"""The Celery app behind ``celery -A worker worker``, ``beat``, ``inspect`` and ``report``.

Importing it reads Settings and touches nothing else: the broker is started and the model looked up when a worker or
beat starts. Knows no torch.
"""

import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import structlog
from celery import Celery
from celery.signals import beat_init, celeryd_init

from engine.client import EngineClient
from jobs.broker import broker_url, ensure_broker
from jobs.open_jobs import OpenJobs
from jobs.queue import Queue, celery_config
from jobs.source import ChunkReader
from jobs.store import Store, open_store
from schemas.errors import NightmillError
from schemas.log import configure_logging
from schemas.model_files import model_ref
from schemas.records import ModelRef
from schemas.settings import Settings
from worker.consumer import Renewal
from worker.metrics import Metrics
from worker.tracing import make_tracer

log = structlog.get_logger(__name__)

MakeClient = Callable[..., EngineClient]


class WorkerApp(Celery):  # type: ignore[misc]
    """The app and what its pool, consumer and task share: one of each per process."""

    def __init__(self, settings: Settings, make_client: MakeClient, on_hop: Callable[[str], None]) -> None:
        super().__init__("nightmill", include=["worker.tasks"])
        self.created_at = time.monotonic()
        self.settings = settings
        self.make_client = make_client
        self.tracer = make_tracer()
        self.on_hop = self.tracer.marking(on_hop)
        self.metrics = Metrics()
        self.conf.update(celery_config(settings, broker_url(settings)))
        self.steps["consumer"].add(Renewal)

    @cached_property
    def job_queue(self) -> Queue:
        """The hints in Redis."""
        return Queue(self.settings, self.conf.broker_url)

    @cached_property
    def store(self) -> Store:
        """Where the job directories lie."""
        return open_store(self.settings.jobs_root)

    @cached_property
    def reader(self) -> ChunkReader:
        """Reads the rows of all chunks, so that neighbours decode a row group once."""
        return ChunkReader(self.settings.jobs.read_batch_bytes)

    @cached_property
    def jobs(self) -> OpenJobs:
        """The jobs that are worked on."""
        return OpenJobs(self.store)

    @cached_property
    def model(self) -> ModelRef:
        """The model this worker serves. Raises ModelError."""
        wanted = self.settings.worker
        return model_ref(
            wanted.model,
            dtype=wanted.dtype,
            quantization=wanted.quantization,
            revision=wanted.revision,
            load_format=wanted.load_format,
            max_model_len=wanted.max_model_len,
            deterministic=wanted.deterministic,
        )


def make_app(
    settings: Settings,
    make_client: MakeClient = EngineClient,
    on_hop: Callable[[str], None] = lambda hop: None,
) -> WorkerApp:
    """Build the app; tests replace the engine's client, and inject faults at the points of a chunk's way.

    ``on_hop`` is called in the slot's thread with ``received``, ``leased``, ``submitted`` (the first request),
    ``validated``, ``committed`` and ``finished``.
    """
    return WorkerApp(settings, make_client, on_hop)


@celeryd_init.connect  # type: ignore[untyped-decorator]
def prepare_worker(instance: Any, **_: Any) -> None:
    """Before a worker is built: logging, the embedded broker, and the queue of its model."""
    app = instance.app
    configure_logging(app.settings.log.level, app.settings.log.format)
    try:
        ensure_broker(app.settings)
        app.conf.task_default_queue = app.model.queue
    except NightmillError as error:
        log.error("worker_cannot_start", reason=str(error))
        sys.exit(error.exit_code)
    log.info("worker_starting", queue=app.model.queue, model=app.model.name, broker=app.connection().as_uri())


@beat_init.connect  # type: ignore[untyped-decorator]
def prepare_beat(sender: Any, **_: Any) -> None:
    """Before beat runs: logging and the embedded broker."""
    configure_logging(sender.app.settings.log.level, sender.app.settings.log.format)
    try:
        ensure_broker(sender.app.settings)
    except NightmillError as error:
        log.error("beat_cannot_start", reason=str(error))
        sys.exit(error.exit_code)


app = make_app(Settings.load())
