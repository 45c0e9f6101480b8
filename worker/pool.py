"""The Celery pool: a few threads (slots) around one resident engine, which is loaded before messages are fetched.

Running chunks are asked to stop, never killed: they give their message back. Knows no Parquet and no rows.
"""

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from wsgiref.simple_server import WSGIServer

import msgspec
import structlog
from celery.concurrency.base import BasePool, apply_target
from celery.worker import state

from engine.client import EngineClient
from schemas.errors import NightmillError, SettingsError
from worker.admission import Admission
from worker.http_server import serve
from worker.machine import Machine
from worker.supervisor import Supervisor

log = structlog.get_logger(__name__)

POLL_S = 0.1
GIVE_BACK_S = 10.0
"""How long chunks that were asked to stop may take to give their messages back."""

MAX_SILENCE_S = 300.0
"""Of the housekeeping thread, which goes round every few seconds, but may finish a large job on its way."""

EXIT_ENGINE_FAILED = 1
FIRST_NUMBER = 10_000_000
"""Deliveries have numbers where Celery expects process ids; these are above any real one."""


class Delivery:
    """A message in the pool. Celery keeps it by weak reference, the pool strongly."""

    def __init__(self, number: int, task_id: str, run: Callable[[], None]) -> None:
        self.number = number
        self.task_id = task_id
        self.run = run
        self.stop_wanted = threading.Event()

    def terminate(self, signal: int | None = None) -> None:
        """Ask the chunk to stop at its next look; it gives its message back, or drops it if it was revoked."""
        self.stop_wanted.set()


class Slot(threading.Thread):
    """A thread that runs one delivery after the other. A daemon: the interpreter's exit waits for no chunk."""

    def __init__(self, pool: "EnginePool", index: int) -> None:
        super().__init__(name=f"slot-{index}", daemon=True)
        self.pool = pool
        self.delivery: Delivery | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether the running delivery was asked to stop."""
        return self.delivery is not None and self.delivery.stop_wanted.is_set()

    def rest(self, seconds: float) -> None:
        """Take no other work for a while; ends early when the delivery is asked to stop."""
        if self.delivery is not None:
            self.delivery.stop_wanted.wait(seconds)

    def run(self) -> None:
        """Run deliveries until the pool says that there are no more."""
        while (delivery := self.pool.next_delivery()) is not None:
            self.delivery = delivery
            try:
                delivery.run()
            except Exception:
                log.exception("delivery_broke", task_id=delivery.task_id)  # in Celery's own callbacks
            finally:
                self.delivery = None
                self.pool.finish(delivery)


def current_slot() -> Slot:
    """The slot that the calling task runs in."""
    thread = threading.current_thread()
    assert isinstance(thread, Slot), "run_chunk runs in worker.pool's slots only"
    return thread


class EnginePool(BasePool):  # type: ignore[misc]
    """See the module's docstring. ``client`` is the engine; it is there while deliveries run."""

    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False
    client: EngineClient
    machine: Machine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._numbers = itertools.count(FIRST_NUMBER)
        self._inbox: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # reentrant: Celery stops the pool from a signal handler too
        self._deliveries: dict[int, Delivery] = {}
        self._is_draining = False
        self._has_failed = False
        self.admission = Admission()
        self._supervisor = Supervisor(self.app, self.is_idle)
        self._server: WSGIServer | None = None

    def on_start(self) -> None:
        """Load the engine, then open the slots. Leaves at once when a shutdown signal comes first."""
        self._serve_http()
        self._supervisor.start()
        settings = self.app.settings.engine_settings()
        self.client = self.app.make_client(self.app.model, settings, on_failed=self._leave)
        self.app.metrics.attach(self.client)
        self._load()
        self.machine = Machine(self.client, settings, time.monotonic() - self.app.created_at)
        self.machine.start()
        for index in range(self.limit):
            Slot(self, index).start()
        log.info("worker_ready", queue=self.app.model.queue, slots=self.limit, engine_pid=self.client.pid)

    def _serve_http(self) -> None:
        settings = self.app.settings.worker
        if settings.metrics_port is None:
            return
        try:
            self._server = serve(
                settings.metrics_host,
                settings.metrics_port,
                self.app.metrics.registry,
                healthz=self.why_unhealthy,
                readyz=self.why_not_ready,
            )
        except SettingsError as error:
            log.error("worker_cannot_start", reason=str(error))
            raise SystemExit(error.exit_code) from error

    def why_unhealthy(self) -> str | None:
        """Return why the worker should be restarted, if it should."""
        silent_s = time.monotonic() - self._supervisor.beat_s
        if self._has_failed:
            return "the engine was given up"
        return f"housekeeping is silent for {silent_s:.0f} s" if silent_s > MAX_SILENCE_S else None

    def why_not_ready(self) -> str | None:
        """Return why the worker takes no chunk now, if so."""
        if self._is_draining:
            return "the worker drains"
        if not self.active or self.client.pid is None:
            return "the engine is not loaded"
        return self.why_unhealthy()

    def on_apply(self, target: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Delivery:
        """Queue one message for the next free slot."""
        number = next(self._numbers)
        callbacks = {name: options.get(name) for name in ("callback", "accept_callback")}
        delivery = Delivery(
            number,
            options.get("correlation_id", ""),
            lambda: apply_target(target, args, kwargs, pid=number, **callbacks),
        )
        with self._changed:
            if not self._is_draining:  # else its message goes back with the channel
                self._deliveries[number] = delivery
                self._inbox.put(delivery)
        return delivery

    def next_delivery(self) -> Delivery | None:
        """Block for the next delivery; None when the pool is closing: what waits then goes back to the queue."""
        delivery = self._inbox.get()
        if delivery is None or not self._is_draining:
            return delivery
        self.finish(delivery)
        return None

    def finish(self, delivery: Delivery) -> None:
        """Forget a delivery that has run."""
        with self._changed:
            self._deliveries.pop(delivery.number, None)
            self._changed.notify_all()

    def task_ids(self) -> frozenset[str]:
        """Task ids of the deliveries that wait or run here."""
        with self._changed:
            return frozenset(delivery.task_id for delivery in self._deliveries.values())

    def is_idle(self) -> bool:
        """Whether the engine is loaded and nothing waits or runs."""
        return self.active and not self._deliveries

    def terminate_job(self, pid: int, signal: int | None = None) -> None:
        """Ask the delivery of this number to stop."""
        if (delivery := self._deliveries.get(pid)) is not None:
            delivery.terminate(signal)

    def on_stop(self) -> None:
        """Let running chunks end for ``worker.drain_s``, then have them give their messages back; end the engine."""
        must_hurry = self._has_failed or state.should_terminate is not None
        self._close(0.0 if must_hurry else self.app.settings.worker.drain_s)

    def on_terminate(self) -> None:
        """Have all chunks give their messages back now; end the engine."""
        self._close(0.0)

    def _load(self) -> None:
        """Start the engine in a thread, since Celery's signal handlers set flags that only a poll sees."""
        outcome: list[NightmillError | None] = []
        loader = threading.Thread(target=lambda: outcome.append(self._start_client()), name="engine-load", daemon=True)
        loader.start()
        try:
            while loader.is_alive():
                loader.join(POLL_S)
                state.maybe_shutdown()
        except BaseException:
            self.client.stop()
            raise
        failure = outcome[0]
        if failure is not None:
            log.error("engine_cannot_start", reason=str(failure))
            self.client.stop()  # ends its thread: one that still logs while the interpreter ends can abort it
            self._supervisor.stop()
            self._supervisor.fail_jobs(str(failure))
            raise SystemExit(failure.exit_code)

    def _start_client(self) -> NightmillError | None:
        try:
            self.client.start()
        except NightmillError as error:
            return error
        return None

    def _leave(self, failure: NightmillError) -> None:
        """Shut down warmly: an engine that is given up serves nobody, and other workers can have the messages."""
        log.error("worker_leaving", reason=str(failure))
        self._has_failed = True
        state.should_stop = EXIT_ENGINE_FAILED

    def _close(self, drain_s: float) -> None:
        self._supervisor.stop()
        self._drop_waiting()
        self._wait_idle(drain_s)
        with self._changed:
            for delivery in self._deliveries.values():
                delivery.terminate()
        self._wait_idle(GIVE_BACK_S)
        if hasattr(self, "machine"):
            self.machine.stop()
        if hasattr(self, "client"):
            self.client.stop()
        self._wait_idle(POLL_S)  # a chunk that was blocked in the engine ends now
        self.app.tracer.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _drop_waiting(self) -> None:
        """Begin nothing more; a message that is neither run nor acknowledged goes back when its channel closes."""
        self._is_draining = True
        while True:
            try:
                delivery = self._inbox.get_nowait()
            except queue.Empty:
                break
            if delivery is not None:
                self.finish(delivery)
        for _ in range(self.limit):
            self._inbox.put(None)

    def _wait_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._deliveries and (left_s := deadline - time.monotonic()) > 0:
                self._changed.wait(min(left_s, POLL_S))

    def _get_info(self) -> Mapping[str, Any]:
        """What ``celery inspect stats`` shows under ``pool``."""
        client = getattr(self, "client", None)
        engine = client and {
            "pid": client.pid,
            "num_restarts": client.num_restarts,
            "num_hangs": client.num_hangs,
            "stats": msgspec.to_builtins(client.stats),
        }
        return {
            **super()._get_info(),
            "queue": self.app.model.queue,
            "deliveries": sorted(self.task_ids()),
            "engine": engine,
        }
