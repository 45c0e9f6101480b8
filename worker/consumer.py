"""The Celery consumer, made safe for long tasks on Redis: no crash and no duplicates when the connection breaks.

Works around Celery 5.7 and kombu 5.7; each workaround names what happens without it. Knows no engine.
"""

import threading
from typing import Any

import celery.worker.consumer
import redis
import structlog
from celery import bootsteps
from celery.worker import state

from schemas.errors import BrokerError, SettingsError
from worker.pool import EnginePool

log = structlog.get_logger(__name__)

RENEWALS_PER_TIMEOUT = 4

LOSSY_SETTINGS = {
    "worker_cancel_long_running_tasks_on_connection_loss": "cancelled chunks are acknowledged and lost",
    "task_reject_on_worker_lost": "a chunk that kills its worker would be delivered for ever",
    "result_backend": "a backend that is away blocks the worker's slots for ever",
    "worker_disable_prefetch": "it is lost at the first reconnect",
}
"""Celery settings that must stay off, and why."""

LOSSY_OPTIONS = {
    "autoscale": "the slots are fixed: set worker.chunks_in_flight",
    "max_tasks_per_child": "the engine is resident, there are no children to replace",
    "max_memory_per_child": "the engine is resident, there are no children to replace",
    "time_limit": "threads cannot be killed; engine.hang_timeout_s bounds a chunk",
    "soft_time_limit": "threads cannot be interrupted; engine.hang_timeout_s bounds a chunk",
}
"""The same for what the worker's command line can set."""


class Consumer(celery.worker.consumer.Consumer):  # type: ignore[misc]
    """Celery's consumer plus a reconnect that keeps what still runs here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_lossy_settings(kwargs["app"].conf, kwargs["pool"], kwargs["controller"])
        super().__init__(*args, **kwargs)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Detach the broken connection's channels, then let Celery drop it.

        Without this, closing a channel puts every message in the queue again that still runs here, so all run twice
        (celery#3430); and if a read was pending, Celery closes the channel a second time, needs the transport's client
        that is gone by then, and the worker exits with an AttributeError (kombu#582).
        """
        transport = getattr(self.connection, "_transport", None)
        for channel in [*getattr(transport, "channels", ()), *getattr(transport, "_avail_channels", ())]:
            _detach(channel)
        super().on_connection_error_after_connected(exc)


def _detach(channel: Any) -> None:
    """Let a broken channel keep its messages, and acknowledge them later through a connection pool of its own."""
    channel.qos.restore_at_shutdown = False  # the renewal keeps them ours
    client = channel.Client(connection_pool=redis.ConnectionPool(**channel._connparams()))
    channel._create_client = lambda asynchronous=False: client


def refuse_lossy_settings(conf: Any, pool: Any, controller: Any) -> None:
    """Raise SettingsError for what is known to lose or to double work with this queue."""
    wrong = [f"{name} must not be set: {reason}" for name, reason in LOSSY_SETTINGS.items() if conf[name]]
    wrong += [
        f"{name} must not be set: {reason}" for name, reason in LOSSY_OPTIONS.items() if getattr(controller, name, None)
    ]
    if not isinstance(pool, EnginePool):
        wrong.append(f"the pool must be worker.pool:EnginePool, not {type(pool).__name__}: start the worker without -P")
    if not conf.task_acks_late:
        wrong.append("task_acks_late must be on: a killed worker's chunks would be lost")
    if wrong:
        raise SettingsError("this worker would lose work: " + "; ".join(wrong))


class Renewal(bootsteps.StartStopStep):  # type: ignore[misc]
    """Renews the messages this worker holds before the visibility timeout gives them to others (celery#5935).

    A thread and a connection of its own: the hub's timers die with a connection (celery#5833), and the messages must
    stay ours through reconnects and a warm shutdown.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, consumer: Any) -> None:
        """Start the thread at the first connect; it outlives every connection."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(consumer,), name="renewal", daemon=True)
            self._thread.start()

    def stop(self, consumer: Any) -> None:
        """Go on: this is called at reconnects and before the pool has drained."""

    def shutdown(self, consumer: Any) -> None:
        """End, before the channel gives back what is left."""
        self._stopped.set()

    def _run(self, consumer: Any) -> None:
        queue = consumer.app.job_queue
        interval_s = consumer.app.settings.worker.visibility_timeout_s / RENEWALS_PER_TIMEOUT
        while not self._stopped.wait(interval_s):
            try:
                queue.renew(held_tags(consumer.pool))
            except BrokerError as error:
                log.warning("renewal_failed", error=str(error))


def held_tags(pool: EnginePool) -> list[str]:
    """Delivery tags of the messages to renew: all that wait here, and those that the pool really has.

    A request whose thread is gone must not be renewed for ever.
    """
    in_pool = pool.task_ids()
    return [
        request.message.delivery_tag
        for request in list(state.requests.values())
        if not request.acknowledged and (request not in state.active_requests or request.id in in_pool)
    ]
