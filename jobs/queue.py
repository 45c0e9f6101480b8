"""Hints in Redis: which chunks are queued, who works on what, how far it is. The truth is the job directory.

Every loss here is healed by ``reconcile``; nothing here decides that work is done. Knows no engine and no worker.
"""

import json
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential, wait_random

from jobs import expiring
from schemas.errors import BrokerError
from schemas.records import Priority, RowStatus
from schemas.settings import Settings

if TYPE_CHECKING:
    from jobs.job import Job

log = structlog.get_logger(__name__)

PREFIX = "nightmill:"
"""Of every key, Celery's too: several applications may share a Redis database without touching each other."""

TASK_NAME = "nightmill.run_chunk"
UNACKED_KEY = PREFIX + "unacked"  # kombu's: messages that a worker holds, by delivery tag
UNACKED_INDEX_KEY = PREFIX + "unacked_index"  # kombu's: when each was delivered or last renewed
STEPS = {Priority.INTERACTIVE: 0, Priority.NIGHTLY: 9}
"""kombu keeps a list for each step of a queue and takes from the lowest step that has a message."""

STEP_MARK = "\x06\x16"  # kombu's, between a queue's name and its step; step 0 has the name alone
CONNECT_TIMEOUT_S = 1.0
CALL_TIMEOUT_S = 5.0
NUM_TRIES = 3
PAGE = 1000  # messages read at a time
SENDING_MS = 10_000  # nobody else looks for missing chunks meanwhile, also if the sender dies; renewed with each page
HINT_PAUSE_S = 5.0
HINT_EXPIRY_S = 7 * 24 * 3600  # leftovers of jobs that nobody finishes

TRANSIENT = (redis.ConnectionError, redis.TimeoutError)

RENEW_HELD = """
local time = redis.call('time')
local now = time[1] + time[2] / 1000000
local function date(tags)
    for _, tag in ipairs(tags) do redis.call('zadd', KEYS[1], 'xx', now, tag) end
end
date(redis.call('zrangebyscore', KEYS[1], now + ARGV[1], '+inf'))
table.remove(ARGV, 1)
date(ARGV)
"""

T = TypeVar("T")


def celery_config(settings: Settings, broker_url: str) -> dict[str, Any]:
    """The Celery configuration of clients and workers; celery-facts of Celery 5.7 with Redis are behind each line."""
    visibility_s = settings.worker.visibility_timeout_s
    return {
        "broker_url": broker_url,
        "result_backend": None,  # results are files; a backend that is away would wedge a worker's slots
        "broker_transport_options": {
            "visibility_timeout": visibility_s,
            "unacked_restore_interval": min(5.0, visibility_s / 4),
            "unacked_restore_throttle": 1,  # the default looks only at every tenth interval
            "unacked_mutex_expire": 10,  # by default, a worker killed while it looks keeps all others from it for 300 s
            "global_keyprefix": PREFIX,
            "priority_steps": list(STEPS.values()),
            "socket_keepalive": True,
            "health_check_interval": 25,
        },
        "visibility_timeout": visibility_s,  # kombu and Celery read it in different places (celery#9339)
        "result_backend_transport_options": {"visibility_timeout": visibility_s},
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_publish_retry_policy": {"max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5},
        "task_serializer": "json",
        "accept_content": ["json"],  # never pickle: whoever can write to the broker could run code
        "task_acks_late": True,
        "task_acks_on_failure": True,
        "task_acks_on_timeout": True,
        "task_ignore_result": True,
        "task_track_started": False,
        "task_reject_on_worker_lost": False,
        "task_retry_on_worker_lost": False,
        "task_send_sent_event": True,
        "worker_prefetch_multiplier": 1,
        "worker_concurrency": settings.worker.chunks_in_flight,
        "worker_pool": "worker.pool:EnginePool",
        "worker_consumer": "worker.consumer:Consumer",
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_soft_shutdown_timeout": 0,
        "worker_send_task_events": True,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        "beat_scheduler": "worker.beat:NightlyScheduler",
        "timezone": "UTC",
    }


def connect(broker_url: str) -> redis.Redis:
    """A Redis client for a Celery broker URL (``redis+socket:///path?virtual_host=1`` too), without hidden retries."""
    options: dict[str, Any] = {"socket_timeout": CALL_TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
    url = urlsplit(broker_url)
    if url.scheme == "redis+socket":
        database = parse_qs(url.query).get("virtual_host", ["0"])[0].strip("/")
        return redis.Redis(unix_socket_path=unquote(url.path), db=int(database or 0), password=url.password, **options)
    return redis.Redis.from_url(broker_url, socket_connect_timeout=CONNECT_TIMEOUT_S, **options)


def list_keys(queue_name: str) -> list[str]:
    """The Redis lists of a queue, in the order in which workers empty them."""
    return [f"{PREFIX}{queue_name}" + (f"{STEP_MARK}{step}" if step else "") for step in STEPS.values()]


def redact(url: str) -> str:
    """The URL without its password."""
    password = urlsplit(url).password
    return url if password is None else url.replace(f":{password}@", ":***@", 1)


class Progress(NamedTuple):
    """Chunks that workers run now, and their rows that are done, by status."""

    num_chunks: int = 0
    counts: Mapping[RowStatus, int] = {}


class Queue:
    """One process's view of the hints. Connects at the first use; safe to share between threads."""

    def __init__(self, settings: Settings, broker_url: str) -> None:
        self.broker_url = broker_url
        self._settings = settings
        self._lease_ms = int(settings.worker.visibility_timeout_s * 500)  # gone before its message comes back
        self._hints_at_s = 0.0
        self._presence_ms = int(max(settings.worker.visibility_timeout_s, 30.0) * 1000)

    def check(self) -> None:
        """Raise BrokerError, naming the URL without its password, unless the broker answers within seconds."""
        self._call(self._redis.ping, tries=1)

    def enqueue(self, job: "Job", indices: Iterable[int]) -> None:
        """Send one message per chunk to the queue of the job's model. Raises BrokerError."""
        with self._sending(job) as (_, go_on):
            self._send(job, indices, go_on)

    def reconcile(self, job: "Job") -> int:
        """Send the pending chunks that are neither queued, nor held by a worker, nor leased; return how many.

        Returns 0 while somebody else is sending the same job's chunks. Raises BrokerError.
        """
        with self._sending(job) as (is_first, go_on):
            if not is_first:
                return 0
            pending = job.pending()
            known = self._queued(job) if pending else frozenset()
            missing = self._unleased(job.job_id, [index for index in pending if index not in known])
            missing = [index for index in missing if not job.is_committed(index)]  # since the first look
            self._send(job, missing, go_on)
            return len(missing)

    def depth(self, queue_name: str) -> int:
        """Messages that wait in a queue, those that workers hold not counted. Raises BrokerError."""
        return sum(self._call(lambda: [int(self._redis.llen(key)) for key in list_keys(queue_name)]))

    def oldest_wait_s(self, queue_name: str) -> float:
        """How long the message waits that waits longest, 0 if none does. Raises BrokerError.

        Only the ends of the queue are looked at: between them stands what came between them.
        """
        places = [(key, end) for key in list_keys(queue_name) for end in (0, -1)]
        messages = self._call(lambda: [self._redis.lindex(key, end) for key, end in places])
        sent_s = [_decode_message(message).headers.sent_s for message in messages if message]
        return max([0.0, *(time.time() - at_s for at_s in sent_s if at_s)])

    def workers_serving(self, queue_name: str) -> int:
        """How many live workers serve a queue, those that still load their model included. Raises BrokerError."""
        pattern = _key("worker", queue_name, "*")
        keys = self._call(lambda: list(self._redis.scan_iter(match=pattern, count=PAGE)))
        return sum(self._call(lambda: expiring.are_held(self._redis, keys)))

    def announce(self, queue_name: str, worker_name: str) -> None:
        """Count this worker among those that serve a queue, for the next half minute or so."""
        self._hint(lambda: expiring.take(self._redis, _key("worker", queue_name, worker_name), "", self._presence_ms))

    def withdraw(self, queue_name: str, worker_name: str) -> None:
        """Count this worker no longer."""
        self._hint(lambda: self._redis.delete(_key("worker", queue_name, worker_name)))

    def take_turn(self, name: str, seconds: float) -> bool:
        """Whether this process is the one that does ``name`` for the next ``seconds``. Raises BrokerError."""
        token, life_ms = uuid.uuid4().hex, int(seconds * 1000)
        return self._call(lambda: expiring.take(self._redis, _key("turn", name), token, life_ms))

    @contextmanager
    def lease(self, job_id: str, index: int) -> Iterator[bool]:
        """Hold a chunk's name while working on it, so that nobody else spends time on it; yields whether it is ours.

        A broker that does not answer gives everybody the lease: the commit decides, the lease only saves work.
        """
        key, token = _key("lease", job_id, index), uuid.uuid4().hex
        taken = self._hint(lambda: expiring.take(self._redis, key, token, self._lease_ms), default=True)
        if not taken:
            yield False
            return
        stopped = threading.Event()
        heartbeat = threading.Thread(target=self._renew_lease, args=(key, token, stopped), name="lease", daemon=True)
        heartbeat.start()
        try:
            yield True
        finally:
            stopped.set()
            heartbeat.join()
            self._hint(lambda: expiring.drop(self._redis, key, token, self._lease_ms))

    def num_deliveries(self, job_id: str, index: int) -> int:
        """How often a chunk has been begun without being committed or given back."""
        return int(self._hint(lambda: self._redis.scard(_key("deliveries", job_id, index)), default=0))

    def deliveries(self, job_id: str, index: int) -> tuple[str, ...]:
        """The tokens of those deliveries, sorted."""
        tokens: set[bytes] = self._hint(lambda: self._redis.smembers(_key("deliveries", job_id, index)), default=set())
        return tuple(sorted(token.decode() for token in tokens))

    def count_delivery(self, job_id: str, index: int, token: str) -> int:
        """Note that a chunk was begun under ``token`` and return how often it has been, this time included.

        A set of tokens and not a counter: a call repeated after a lost answer counts once. A Redis that lost its data
        counts afresh, so that the chunk gets its tries again.
        """
        key = _key("deliveries", job_id, index)

        def count() -> int:
            with self._redis.pipeline() as pipe:
                pipe.sadd(key, token)
                pipe.expire(key, HINT_EXPIRY_S)
                pipe.scard(key)
                return int(pipe.execute()[-1])

        return int(self._hint(count, default=1))

    def uncount_delivery(self, job_id: str, index: int, token: str) -> None:
        """Take back ``count_delivery``: the chunk was given back, which is no fault of its own."""
        self._hint(lambda: self._redis.srem(_key("deliveries", job_id, index), token))

    def forget_deliveries(self, job_id: str, index: int) -> None:
        """Start counting afresh: the chunk is committed, or is to be tried again on purpose."""
        self._hint(lambda: self._redis.delete(_key("deliveries", job_id, index)))

    def progress(self, job_id: str, index: int, counts: Mapping[RowStatus, int]) -> None:
        """Publish how many rows of a running chunk have which status."""
        key, value = _key("progress", job_id), json.dumps(counts)

        def publish() -> None:
            with self._redis.pipeline() as pipe:
                pipe.hset(key, str(index), value)
                pipe.expire(key, HINT_EXPIRY_S)
                pipe.execute()

        self._hint(publish)

    def clear_progress(self, job_id: str, index: int) -> None:
        """Forget a chunk's progress: its part counts now, or it starts again."""
        self._hint(lambda: self._redis.hdel(_key("progress", job_id), str(index)))

    def read_progress(self, job: "Job") -> Progress:
        """What runs now, committed chunks not counted; nothing if the broker is away."""
        fields: dict[bytes, bytes] = self._hint(lambda: self._redis.hgetall(_key("progress", job.job_id)), default={})
        committed = job.committed() if fields else frozenset()
        running = [value for index, value in fields.items() if int(index) not in committed]
        counts: Counter[RowStatus] = Counter()
        for value in running:
            counts.update(msgspec.json.decode(value, type=dict[RowStatus, int]))
        return Progress(len(running), dict(counts))

    def renew(self, delivery_tags: Iterable[str]) -> None:
        """Say that this worker still holds these messages, or they would be delivered again (celery#5935).

        Only messages that are still unacknowledged are touched. Those dated later than a visibility timeout from now,
        by a clock that was wrong or has gone back since, are dated anew, or nobody would get a dead worker's for as
        long. Raises BrokerError.
        """
        arguments = (str(self._settings.worker.visibility_timeout_s), *delivery_tags)
        self._call(lambda: self._redis.eval(RENEW_HELD, 1, UNACKED_INDEX_KEY, *arguments))

    @cached_property
    def _redis(self) -> redis.Redis:
        return connect(self.broker_url)

    @cached_property
    def _app(self) -> Any:
        from celery import Celery

        app = Celery("nightmill", set_as_current=False)
        app.conf.update(celery_config(self._settings, self.broker_url))
        return app

    @contextmanager
    def _sending(self, job: "Job") -> Iterator[tuple[bool, Callable[[], object]]]:
        """Tell others that a job's chunks are being sent; yields whether nobody else is at it, and what renews that."""
        key, token = _key("sending", job.job_id), uuid.uuid4().hex

        def go_on() -> bool:
            return expiring.take(self._redis, key, token, SENDING_MS)

        is_first = self._call(go_on)
        try:
            yield is_first, go_on
        finally:
            self._hint(lambda: expiring.drop(self._redis, key, token, SENDING_MS))

    def _send(self, job: "Job", indices: Iterable[int], go_on: Callable[[], object]) -> None:
        from kombu.exceptions import OperationalError

        try:
            with self._app.producer_pool.acquire(block=True) as producer:
                for number, index in enumerate(indices):
                    if number % PAGE == PAGE - 1:
                        self._hint(go_on)
                    self._app.send_task(
                        TASK_NAME,
                        args=(job.job_id, index),
                        task_id=_message_id(job.job_id, index),
                        queue=job.spec.model.queue,
                        priority=STEPS[job.priority],
                        headers={"sent_s": time.time()},
                        producer=producer,
                    )
        except (OperationalError, OSError, *TRANSIENT) as error:
            raise self._unreachable(error) from error

    def _queued(self, job: "Job") -> frozenset[int]:
        """Chunks of a job that have a message: first the waiting, then the held, in the order in which they move."""
        ids: list[str] = []
        for key in list_keys(job.spec.model.queue):
            start = 0
            while page := self._call(partial(self._redis.lrange, key, start, start + PAGE - 1)):
                ids += [_decode_message(message).headers.id for message in page]
                start += len(page)
        held = self._call(lambda: self._redis.hvals(UNACKED_KEY))
        ids += [_decode_held(entry)[0].headers.id for entry in held]
        return frozenset(index for job_id, index in map(_parse_message_id, ids) if job_id == job.job_id)

    def _unleased(self, job_id: str, indices: list[int]) -> list[int]:
        if not indices:
            return []
        keys = [_key("lease", job_id, index) for index in indices]
        held = self._call(lambda: expiring.are_held(self._redis, keys))
        return [index for index, is_held in zip(indices, held, strict=True) if not is_held]

    def _renew_lease(self, key: str, token: str, stopped: threading.Event) -> None:
        while not stopped.wait(self._lease_ms / 3000):
            self._hint(lambda: expiring.take(self._redis, key, token, self._lease_ms))

    def _call(self, action: Callable[[], T], tries: int = NUM_TRIES) -> T:
        """Run an idempotent Redis call, again after transient errors. Raises BrokerError."""
        retrying = Retrying(
            retry=retry_if_exception_type(TRANSIENT),
            stop=stop_after_attempt(tries),
            wait=wait_exponential(multiplier=0.05, max=0.5) + wait_random(0, 0.1),
            reraise=True,
        )
        try:
            return retrying(action)
        except redis.RedisError as error:
            raise self._unreachable(error) from error

    def _hint(self, action: Callable[[], T], default: Any = None) -> Any:
        """Run a Redis call that the work can do without: a failure is logged and ``default`` returned.

        After one, hints are not even tried for a while: waiting for a lost network must not slow the rows down.
        """
        if time.monotonic() < self._hints_at_s:
            return default
        try:
            return self._call(action)
        except BrokerError as error:
            self._hints_at_s = time.monotonic() + HINT_PAUSE_S
            log.warning("broker_hint_lost", error=str(error), pause_s=HINT_PAUSE_S)
            return default

    def _unreachable(self, error: Exception) -> BrokerError:
        return BrokerError(
            f"the broker {redact(self.broker_url)} cannot be used: {error}: "
            "start it, or correct NIGHTMILL_BROKER_URL (unset: an embedded broker)"
        )


class _Headers(msgspec.Struct):
    id: str = ""
    sent_s: float = 0.0


class _Message(msgspec.Struct):
    headers: _Headers


_decode_message = msgspec.json.Decoder(_Message).decode
_decode_held = msgspec.json.Decoder(tuple[_Message, str | None, str | None]).decode


def _key(kind: str, *parts: object) -> str:
    return PREFIX + ":".join((kind, *map(str, parts)))


def _message_id(job_id: str, index: int) -> str:
    """A task id that tells the chunk; unique per message, since Celery refuses an id that was once revoked."""
    return f"{job_id}:{index}:{uuid.uuid4().hex[:8]}"


def _parse_message_id(message_id: str) -> tuple[str, int]:
    """The chunk that a message is about; ("", -1) for messages of others."""
    job_id, _, rest = message_id.rpartition(":")[0].rpartition(":")
    return (job_id, int(rest)) if job_id and rest.isdigit() else ("", -1)
