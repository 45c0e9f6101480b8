import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import redis

from jobs.expiring import take
from jobs.queue import (
    PAGE,
    PREFIX,
    UNACKED_INDEX_KEY,
    Progress,
    Queue,
    _message_id,
    _parse_message_id,
    celery_config,
    connect,
    list_keys,
    redact,
)
from schemas.errors import BrokerError
from schemas.records import JobSpec, ModelRef, Priority, RowStatus
from schemas.settings import Settings, WorkerSettings
from tests.clock import step_clock

MODEL = ModelRef(name="tiny", digest="0123456789abcdef")
SPEC = JobSpec(name="tickets", inputs=(), model=MODEL)


@dataclass
class FakeJob:
    """What the queue asks of a job."""

    num_chunks: int
    spec: JobSpec = SPEC
    done: set[int] = field(default_factory=set)
    job_id: str = SPEC.job_id
    priority: Priority = Priority.INTERACTIVE

    def committed(self) -> frozenset[int]:
        return frozenset(self.done)

    def pending(self) -> tuple[int, ...]:
        return tuple(index for index in range(self.num_chunks) if index not in self.done)

    def is_committed(self, index: int) -> bool:
        return index in self.done


@pytest.fixture
def queue(broker: str, client: redis.Redis) -> Queue:
    return Queue(Settings(worker=WorkerSettings(visibility_timeout_s=2)), broker)


def pop(client: redis.Redis) -> bytes:
    """Take the oldest message, as a worker's BRPOP does."""
    message = client.rpop(PREFIX + MODEL.queue)
    assert isinstance(message, bytes)
    return message


def test_chunks_wait_in_the_queue_of_their_model_and_every_key_has_the_prefix(
    client: redis.Redis, queue: Queue
) -> None:
    queue.enqueue(FakeJob(3), [0, 1, 2])
    assert queue.depth(MODEL.queue) == 3
    assert queue.depth("another") == 0
    assert all(key.startswith(PREFIX.encode()) for key in client.scan_iter())


def test_reconcile_sends_exactly_what_is_neither_queued_nor_held_nor_leased_nor_committed(
    client: redis.Redis, queue: Queue
) -> None:
    job = FakeJob(1100, done={7})
    queue.enqueue(job, range(1100))  # more than one page
    lost = [_pop_index(client) for _ in range(3)]
    held = pop(client)
    client.hset(PREFIX + "unacked", "tag", b'[%s, "", "q"]' % held)
    assert lost == [0, 1, 2]
    with queue.lease(job.job_id, 0) as is_ours:
        assert is_ours
        assert queue.reconcile(job) == 2
    assert queue.reconcile(job) == 1
    assert queue.reconcile(job) == 0


def _pop_index(client: redis.Redis) -> int:
    import msgspec

    return _parse_message_id(msgspec.json.decode(pop(client))["headers"]["id"])[1]


def test_an_interactive_job_s_messages_wait_in_front_of_a_nightly_one_s(client: redis.Redis, queue: Queue) -> None:
    nightly = FakeJob(2, job_id="night-000000000000", priority=Priority.NIGHTLY)
    queue.enqueue(nightly, range(2))
    queue.enqueue(FakeJob(3), range(3))
    assert queue.depth(MODEL.queue) == 5
    assert [client.llen(key) for key in list_keys(MODEL.queue)] == [3, 2]
    assert queue.reconcile(nightly) == queue.reconcile(FakeJob(3)) == 0


def test_reconcile_after_a_flush_sends_all_that_is_pending(client: redis.Redis, queue: Queue) -> None:
    job = FakeJob(5, done={1})
    queue.enqueue(job, job.pending())
    client.flushall()
    assert queue.reconcile(job) == 4
    assert queue.depth(MODEL.queue) == 4


def test_reconcile_does_nothing_while_another_process_sends(client: redis.Redis, queue: Queue) -> None:
    client.set(f"{PREFIX}sending:{SPEC.job_id}", "1")
    assert queue.reconcile(FakeJob(3)) == 0
    client.delete(f"{PREFIX}sending:{SPEC.job_id}")
    assert queue.reconcile(FakeJob(3)) == 3


def test_two_jobs_in_one_queue_are_told_apart(queue: Queue, client: redis.Redis) -> None:
    queue.enqueue(FakeJob(3), range(3))
    other = FakeJob(3, job_id="other-000000000000")
    assert queue.reconcile(other) == 3
    assert queue.reconcile(other) == 0


@pytest.mark.slow
def test_five_thousand_chunks_cost_no_memory_and_leave_no_results(queue: Queue, client: redis.Redis) -> None:
    """celery#3813, celery#6963: each result of a sent task is kept, here and in the backend."""
    process, job = psutil.Process(), FakeJob(6_000)
    queue.enqueue(job, range(1_000))
    before = process.memory_info().rss
    queue.enqueue(job, range(1_000, 6_000))
    assert process.memory_info().rss - before < 4 * 2**20
    assert queue.depth(MODEL.queue) == 6_000
    kinds = {key.decode().removeprefix(PREFIX).partition(".")[0] for key in client.scan_iter()}
    assert kinds == {"nightmill", "_kombu"}, "the queue and its binding"


def test_message_ids_name_the_chunk_and_foreign_ids_name_none() -> None:
    assert _parse_message_id(_message_id("a:b-1", 12)) == ("a:b-1", 12)
    assert _message_id("a", 1) != _message_id("a", 1)
    for foreign in ("", "x", "x:y", "a:b:c", "0c1b6cbe-3c04-4a10-a4e5-1f1f3c9f3a6e"):
        assert _parse_message_id(foreign) == ("", -1)


def test_a_lease_has_one_holder_outlives_its_time_by_heartbeats_and_ends_with_the_block(
    queue: Queue, client: redis.Redis
) -> None:
    key = f"{PREFIX}lease:job:1"
    with queue.lease("job", 1) as first, queue.lease("job", 1) as second, queue.lease("job", 2) as other:
        assert (first, second, other) == (True, False, True)
        remaining_ms = _collect_ttl(client, key, 2.0)
        assert min(remaining_ms) > 0
        assert any(after > before for before, after in itertools.pairwise(remaining_ms)), "never renewed"
    assert not client.exists(key)


def _collect_ttl(client: redis.Redis, key: str, seconds: float) -> list[int]:
    end_s, seen = time.monotonic() + seconds, []
    while time.monotonic() < end_s:
        seen.append(client.pttl(key))
        time.sleep(0.05)
    return seen


def test_a_lease_that_somebody_else_has_by_now_is_neither_renewed_nor_dropped(
    queue: Queue, client: redis.Redis
) -> None:
    key = f"{PREFIX}lease:job:1"
    with queue.lease("job", 1):
        client.delete(key)
        assert take(client, key, "somebody", 60_000)
        assert min(_collect_ttl(client, key, 1.0)) > 50_000
    assert client.get(key) == b"60000:somebody"


def test_a_flushed_broker_gets_a_held_lease_back(queue: Queue, client: redis.Redis) -> None:
    with queue.lease("job", 1):
        client.flushall()
        deadline = time.monotonic() + 10
        while not client.exists(f"{PREFIX}lease:job:1"):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_deliveries_are_counted_by_token_and_can_be_taken_back(queue: Queue, client: redis.Redis) -> None:
    assert [queue.count_delivery("job", 1, token) for token in "aab"] == [1, 1, 2]
    assert queue.num_deliveries("job", 1) == 2
    queue.uncount_delivery("job", 1, "a")
    assert queue.count_delivery("job", 1, "c") == 2
    queue.forget_deliveries("job", 1)
    assert queue.count_delivery("job", 1, "d") == 1


def test_progress_adds_up_over_running_chunks_without_the_committed(queue: Queue, client: redis.Redis) -> None:
    job = FakeJob(3)
    queue.progress(job.job_id, 0, {RowStatus.OK: 5, RowStatus.INVALID: 1})
    queue.progress(job.job_id, 0, {RowStatus.OK: 7, RowStatus.INVALID: 1})
    queue.progress(job.job_id, 1, {RowStatus.OK: 2})
    queue.progress(job.job_id, 2, {RowStatus.FAILED: 9})
    queue.clear_progress(job.job_id, 2)
    assert queue.read_progress(job) == Progress(2, {RowStatus.OK: 9, RowStatus.INVALID: 1})
    job.done.add(0)
    assert queue.read_progress(job) == Progress(1, {RowStatus.OK: 2})


def test_workers_are_counted_per_queue_until_they_withdraw(queue: Queue, client: redis.Redis) -> None:
    for name in ("a", "b", "a"):
        queue.announce(MODEL.queue, name)
    queue.announce(MODEL.queue + ".other", "c")
    assert queue.workers_serving(MODEL.queue) == 2
    queue.withdraw(MODEL.queue, "a")
    assert queue.workers_serving(MODEL.queue) == 1
    assert 0 < client.pttl(f"{PREFIX}worker:{MODEL.queue}:b") <= 30_000


def test_one_process_at_a_time_takes_a_turn(queue: Queue, client: redis.Redis) -> None:
    assert queue.take_turn("reconcile", 60)
    assert not queue.take_turn("reconcile", 60)


def test_renewal_touches_only_messages_that_are_still_unacknowledged(queue: Queue, client: redis.Redis) -> None:
    now_s = time.time()
    client.zadd(UNACKED_INDEX_KEY, {"mine": 1.0, "theirs": 2.0, "recent": now_s})
    queue.renew(["mine", "acked"])
    queue.renew([])
    dates = dict(client.zrange(UNACKED_INDEX_KEY, 0, -1, withscores=True))
    assert dates == {b"theirs": 2.0, b"recent": now_s, b"mine": pytest.approx(now_s, abs=20)}


def test_renewal_dates_anew_what_a_clock_that_went_back_dated_in_the_future(queue: Queue, client: redis.Redis) -> None:
    client.zadd(UNACKED_INDEX_KEY, {"of a dead worker": time.time()})
    step_clock(client, -3600)
    queue.renew([])
    ((_, date_s),) = client.zrange(UNACKED_INDEX_KEY, 0, -1, withscores=True)
    assert date_s == pytest.approx(time.time(), abs=20)


@pytest.mark.parametrize("seconds", [-3600, 3600])
def test_a_step_of_the_clock_hides_no_missing_chunk(queue: Queue, client: redis.Redis, seconds: float) -> None:
    """All that a killed client and a killed worker had said they were doing."""
    job = FakeJob(2)
    with queue._sending(job) as (is_first, _):
        assert is_first
        assert queue.take_turn("reconcile", 60)
        queue.announce(MODEL.queue, "dead")
        with queue.lease(job.job_id, 1):
            step_clock(client, seconds)
            assert queue.workers_serving(MODEL.queue) == 0
            assert queue.take_turn("reconcile", 60)
            assert queue.reconcile(job) == 2


def test_an_unreachable_broker_is_an_error_with_its_url_and_without_its_password() -> None:
    queue = Queue(Settings(), "redis://user:hunter2@127.0.0.1:1/0")
    with pytest.raises(BrokerError) as caught:
        queue.check()
    assert "redis://user:***@127.0.0.1:1/0" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(BrokerError):
        queue.enqueue(FakeJob(1), [0])
    with pytest.raises(BrokerError):
        queue.reconcile(FakeJob(1))


def test_hints_are_given_up_when_the_broker_is_away(tmp_path: Path) -> None:
    queue = Queue(Settings(), f"redis+socket://{tmp_path}/nobody.sock")
    with queue.lease("job", 1) as is_ours:
        assert is_ours
    assert queue.count_delivery("job", 1, "token") == 1
    queue.progress("job", 1, {})
    assert queue.read_progress(FakeJob(1)) == Progress()


def test_the_database_of_a_socket_url_is_honoured(broker: str, client: redis.Redis) -> None:
    with connect(f"{broker}?virtual_host=3") as other:
        other.set("here", 1)
        assert not client.exists("here")
        other.flushdb()
    assert redact("redis://h:1/0") == "redis://h:1/0"


def test_the_visibility_timeout_is_set_everywhere_it_is_read() -> None:
    """celery#9339: one of three places decides, and which one depends on the reader."""
    config = celery_config(Settings(worker=WorkerSettings(visibility_timeout_s=9)), "redis://h")
    assert config["visibility_timeout"] == config["broker_transport_options"]["visibility_timeout"] == 9
    assert config["result_backend_transport_options"]["visibility_timeout"] == 9


def test_a_sender_that_dies_holds_the_others_up_for_seconds_and_a_slow_one_for_as_long_as_it_takes(
    broker: str, client: redis.Redis
) -> None:
    queue, key = Queue(Settings(), broker), f"{PREFIX}sending:{SPEC.job_id}"

    def indices() -> Iterator[int]:
        assert 0 < client.pttl(key) <= 10_000
        for index in range(PAGE):
            client.pexpire(key, 60)
            yield index
        assert client.pttl(key) > 60

    queue.enqueue(FakeJob(PAGE), indices())
    assert not client.exists(key)
