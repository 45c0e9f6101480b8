"""The engine process and its client against a fake engine: deaths, hangs, poison, credits, and nothing left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineClient
from engine.frames import PROTOCOL_VERSION, Fatal, Hello, RankFrame, Start, decode_rank_frame
from engine.pipe import LENGTH, FrameBuffer, pack
from schemas.errors import EngineError, ModelError, NightmillError, SettingsError
from schemas.records import Completion, Constraint, ConstraintKind, FinishReason, ModelRef, Request, Sampling
from schemas.settings import EngineSettings

FAKE_RANK = (sys.executable, str(Path(__file__).with_name("fake_rank.py")))
CHOICE = Constraint(kind=ConstraintKind.CHOICE, source='["yes", "no"]')
DEADLINE_S = 60.0


def make_client(
    name: str = "fake", *, on_failed: Callable[[NightmillError], None] | None = None, **settings: Any
) -> EngineClient:
    model = ModelRef(name=name, digest="0")
    return EngineClient(model, EngineSettings(**settings), on_failed=on_failed, command=FAKE_RANK)


@contextmanager
def running(name: str = "fake", **arguments: Any) -> Iterator[EngineClient]:
    client = make_client(name, **arguments)
    try:
        client.start()
        yield client
    finally:
        client.stop()


def make_request(text: str, *, num_steps: int = 3, **fields: Any) -> Request:
    return Request(request_id=f"id of {text}", text=text, sampling=Sampling(max_tokens=num_steps), seed=7, **fields)


def wait_until(holds: Callable[[], Any], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, "deadline passed"
        threading.Event().wait(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def results(futures: list[Future[Completion]]) -> list[Completion]:
    return [future.result(DEADLINE_S) for future in futures]


def test_every_request_gets_its_own_completion_in_any_order_of_ids() -> None:
    with running() as client:
        assert client.hello.device == "fake"
        assert client.hello.kernels == (("linear", "fake", "test"),)
        requests = [make_request(f"row {index}", num_steps=1 + index % 5) for index in range(200)]
        completions = results([client.submit(request) for request in requests])
        assert [c.request_id for c in completions] == [request.request_id for request in requests]
        assert [c.text for c in completions] == [f"{request.text}|7|None" for request in requests]


def test_the_counts_of_the_last_step_come_before_the_last_completion() -> None:
    with running() as client:
        for index in range(1, 4):
            results([client.submit(make_request("row", num_steps=5))])
            assert client.stats is not None
            assert (client.stats.phase, client.stats.num_steps) == ("idle", 5 * index)
            assert client.settled_stats() == client.stats


def test_counts_are_settled_when_the_last_request_of_all_replicas_is_resolved() -> None:
    with running(data_parallel=2) as client:
        futures = [client.submit(make_request(f"row {index}", num_steps=50 * index)) for index in (1, 2)]
        stats = client.settled_stats()
        assert stats is not None
        assert (stats.phase, stats.num_steps) == ("idle", 150)
        assert all(future.done() for future in futures)
    assert client.settled_stats() is None


def test_equal_request_ids_in_flight_do_not_mix() -> None:
    with running() as client:
        requests = [Request(request_id="same", text=f"t{index}") for index in range(5)]
        assert [c.text for c in results([client.submit(r) for r in requests])] == [f"t{i}|0|None" for i in range(5)]


def test_a_request_that_cannot_be_encoded_fails_alone() -> None:
    with running() as client:
        bad, good = results([client.submit(make_request("\ud800")), client.submit(make_request("good"))])
        assert bad.finish_reason == FinishReason.ERROR
        assert "surrogates" in (bad.error or "")
        assert good.finish_reason == FinishReason.STOP


def test_a_constraint_must_come_with_the_request_that_names_it() -> None:
    with running() as client, pytest.raises(ValueError, match="pass that constraint"):
        client.submit(make_request("row", constraint_key=CHOICE.key))


def test_a_killed_rank_loses_no_request_and_changes_no_answer() -> None:
    with running() as client:
        num_resolved: Counter[str] = Counter()
        requests = [make_request(f"row {i}", num_steps=20, constraint_key=CHOICE.key) for i in range(150)]
        with ThreadPoolExecutor(4) as pool:
            futures = list(pool.map(lambda request: client.submit(request, CHOICE), requests[:16]))
            rest = pool.submit(lambda: [client.submit(request, CHOICE) for request in requests[16:]])
            wait_until(lambda: any(future.done() for future in futures))
            first_pid = client.pid
            assert first_pid is not None
            os.kill(first_pid, signal.SIGKILL)
            futures += rest.result(DEADLINE_S)
        for future in futures:
            future.add_done_callback(lambda done: num_resolved.update([done.result().request_id]))
        assert [c.text for c in results(futures)] == [f"{request.text}|7|{CHOICE.source}" for request in requests]
        assert set(num_resolved.values()) == {1}
        assert client.num_restarts == 1
        assert client.pid != first_pid


@pytest.mark.parametrize("action", ["kill", "raise"])
def test_a_poison_request_ends_with_an_error_and_its_neighbours_complete(action: str) -> None:
    with running() as client:
        requests = [make_request(f"row {index}", num_steps=10) for index in range(40)]
        requests[9] = make_request(action)
        completions = results([client.submit(request) for request in requests])
        poison = completions.pop(9)
        assert poison.finish_reason == FinishReason.ERROR
        assert "died 3 times with this request in flight" in (poison.error or "")
        assert ("SIGKILL" if action == "kill" else "illegal memory access") in (poison.error or "")
        assert {c.finish_reason for c in completions} == {FinishReason.STOP}
        assert client.num_restarts == 3


def test_two_poison_requests_do_not_take_a_neighbour_with_them() -> None:
    with running() as client:
        requests = [make_request(f"row {index}", num_steps=10) for index in range(20)]
        requests[2], requests[12] = make_request("kill"), make_request("kill")
        reasons = Counter(c.finish_reason for c in results([client.submit(request) for request in requests]))
        assert reasons == {FinishReason.STOP: 18, FinishReason.ERROR: 2}


def test_many_poison_requests_do_not_use_up_the_restarts() -> None:
    """Deaths that were traced to a request say nothing about the engine, as long as it serves the others."""
    with running(max_restarts=5) as client:
        requests = [make_request(f"row {index}") for index in range(30)]
        for index in (3, 11, 12, 25):
            requests[index] = make_request("kill")
        completions = results([client.submit(request) for request in requests])
        failed = [index for index, done in enumerate(completions) if done.finish_reason is FinishReason.ERROR]
        assert failed == [3, 11, 12, 25]
        assert client.num_restarts > 5


def test_an_engine_that_serves_nothing_is_given_up_however_many_requests_are_blamed() -> None:
    with running(max_restarts=3) as client:
        futures = [client.submit(make_request("kill")) for _ in range(12)]
        with pytest.raises(EngineError, match="died 4 times"):
            futures[-1].result(DEADLINE_S)


@pytest.mark.parametrize("how", ["hung step", "stopped process"])
def test_a_hang_is_noticed_and_cured_by_a_restart(how: str, tmp_path: Path) -> None:
    with running(hang_timeout_s=3.0) as client:
        text = f"hang-once:{tmp_path / 'mark'}" if how == "hung step" else "row"
        if how == "stopped process":
            assert client.pid is not None
            os.kill(client.pid, signal.SIGSTOP)
        completions = results([client.submit(make_request(text)), client.submit(make_request("neighbour"))])
        assert [c.text for c in completions] == [f"{text}|7|None", "neighbour|7|None"]
        assert (client.num_restarts, client.num_hangs) == (1, 1)


def test_an_idle_engine_outlives_the_hang_limit() -> None:
    with running(hang_timeout_s=2.0) as client:
        pid, steps = client.pid, []
        end = time.monotonic() + 3.0
        wait_until(lambda: steps.append(client.stats) or time.monotonic() > end)
        assert client.pid == pid
        assert client.num_restarts == 0


def test_too_many_deaths_fail_every_future_and_call_on_failed() -> None:
    failures: list[NightmillError] = []
    with running(max_restarts=1, on_failed=failures.append) as client:
        futures = [client.submit(make_request("kill")), client.submit(make_request("neighbour", num_steps=10_000))]
        for future in futures:
            with pytest.raises(EngineError, match=r"died 2 times in 10 minutes, last: .*SIGKILL"):
                future.result(DEADLINE_S)
        wait_until(lambda: failures)
        assert len(failures) == 1
        with pytest.raises(EngineError, match="died 2 times"):
            client.submit(make_request("row"))
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("name", "error_type", "message"),
    [
        (
            "bad:config.json has an unknown field rope_magic",
            ModelError,
            "^config.json has an unknown field rope_magic$",
        ),
        ("oom", EngineError, "MemoryError: out of memory: tried to allocate 900 GiB"),
        ("exit:3", EngineError, "ended with status 3"),
        ("die-loading", EngineError, "killed by SIGKILL"),
    ],
)
def test_a_failed_start_raises_its_cause_and_tries_no_further(
    name: str, error_type: type[Exception], message: str
) -> None:
    client = make_client(name)
    with pytest.raises(error_type, match=message):
        client.start()
    assert client.num_restarts == (name == "die-loading")
    with pytest.raises(error_type, match=message):
        client.submit(make_request("row"))
    client.stop()


def test_a_rank_killed_once_while_loading_is_started_again(tmp_path: Path) -> None:
    with running(f"die-loading-once:{tmp_path / 'mark'}") as client:
        assert client.num_restarts == 1
        assert client.submit(make_request("row")).result(DEADLINE_S).text == "row|7|None"


def test_a_start_that_takes_too_long_names_the_setting(tmp_path: Path) -> None:
    client = make_client(f"load-for-ever:{tmp_path / 'pid'}", start_timeout_s=1.0)
    with pytest.raises(EngineError, match=r"did not load within 1 s: raise engine.start_timeout_s"):
        client.start()


def test_stop_interrupts_a_start_and_ends_the_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    client = make_client(f"load-for-ever:{pid_file}")
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(client.start)
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        client.stop()
        with pytest.raises(EngineError, match="the engine was stopped"):
            started.result(DEADLINE_S)
    assert not is_alive(int(pid_file.read_text()))


def test_stop_ends_a_hung_step_and_fails_what_is_unresolved(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with running() as client:
        future, pid = client.submit(make_request(f"hang-once:{mark}")), client.pid
        wait_until(mark.exists)
        client.stop()
        client.stop()
        with pytest.raises(EngineError, match="the engine was stopped"):
            future.result(DEADLINE_S)
        assert pid is not None
        assert not is_alive(pid)
        with pytest.raises(EngineError, match="the engine was stopped"):
            client.submit(make_request("row"))
        client.cancel(["unknown"])


def test_a_client_that_never_started_says_so() -> None:
    client = make_client()
    with pytest.raises(EngineError, match="start the engine"):
        client.submit(make_request("row"))
    with pytest.raises(EngineError, match="not been started"):
        _ = client.hello
    client.stop()
    with pytest.raises(EngineError, match="the engine was stopped"):
        client.start()


def test_the_signals_of_a_terminal_do_not_end_the_rank() -> None:
    with running() as client:
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        assert client.submit(make_request("row", num_steps=50)).result(DEADLINE_S).text == "row|7|None"
        assert client.pid == pid
        assert os.getsid(pid) == pid


def test_submit_blocks_for_credits_and_cancel_gives_them_back() -> None:
    with running(max_num_seqs=2) as client:
        endless = [client.submit(make_request(f"endless {index}", num_steps=10**9)) for index in range(2)]
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(client.submit, make_request("third"))
            wait_until(lambda: client.stats and client.stats.num_running == 2)
            assert not third.done()
            client.cancel(["id of endless 0"])
            assert endless[0].result(DEADLINE_S).finish_reason == FinishReason.CANCELLED
            assert third.result(DEADLINE_S).result(DEADLINE_S).finish_reason == FinishReason.STOP
        assert not endless[1].done()


def test_a_blocked_submit_ends_when_the_client_stops() -> None:
    with running(max_num_seqs=1) as client, ThreadPoolExecutor(1) as pool:
        client.submit(make_request("endless", num_steps=10**9))
        second = pool.submit(client.submit, make_request("second"))
        client.stop()
        with pytest.raises(EngineError, match="the engine was stopped"):
            second.result(DEADLINE_S)


def test_a_request_cancelled_between_two_ranks_is_not_sent_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running() as client:
        cancelled = client.submit(make_request("endless", num_steps=10**9))
        kept = client.submit(make_request(f"until:{gate}"))
        wait_until(lambda: client.stats and client.stats.num_running == 2)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        gate.touch()
        client.cancel(["id of endless"])
        assert cancelled.result(DEADLINE_S).finish_reason == FinishReason.CANCELLED
        assert kept.result(DEADLINE_S).finish_reason == FinishReason.STOP


def test_replicas_share_the_rows_and_each_has_its_credits() -> None:
    with running(data_parallel=2, max_num_seqs=4) as client:
        assert len(client.pids) == 2
        assert client.num_credits == 8
        endless = [client.submit(make_request(f"endless {index}", num_steps=10**9)) for index in range(8)]
        wait_until(lambda: client.stats and client.stats.num_running == 8)  # a rank with five would have failed
        client.cancel([f"id of endless {index}" for index in range(8)])
        assert {future.result(DEADLINE_S).finish_reason for future in endless} == {FinishReason.CANCELLED}
        futures = [client.submit(make_request(f"row {index}")) for index in range(40)]
        assert [future.result(DEADLINE_S).text for future in futures] == [f"row {index}|7|None" for index in range(40)]


@pytest.mark.parametrize(("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_that_dies_or_hangs_takes_the_engine_along_and_no_row_is_lost(
    victim: int, number: signal.Signals, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with running(data_parallel=2, max_num_seqs=8, hang_timeout_s=2.5) as client:
        pids = client.pids
        futures = [client.submit(make_request(f"until:{gate}")) for _ in range(16)]
        wait_until(lambda: client.stats and client.stats.num_running == 16)
        os.kill(pids[victim], number)
        gate.touch()
        assert {future.result(DEADLINE_S).finish_reason for future in futures} == {FinishReason.STOP}
        assert client.num_restarts == 1
        assert client.num_hangs == (number == signal.SIGSTOP)
        assert not set(pids) & set(client.pids)
        assert not any(is_alive(pid) for pid in pids)


def test_a_rank_that_cannot_load_is_the_cause_that_is_reported() -> None:
    client = make_client("bad:no such layer", data_parallel=2)
    with pytest.raises(ModelError, match="no such layer"):
        client.start()
    assert client.pids == ()


def test_degrees_that_do_not_fit_fail_before_a_process_starts() -> None:
    with pytest.raises(SettingsError, match="expert_parallel 2 does not divide"):
        make_client(expert_parallel=2)


def test_a_killed_worker_takes_its_rank_along_even_in_a_hung_step(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = [sys.executable, str(Path(__file__).with_name("fake_parent.py")), f"hang-once:{mark}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            rank_pid = int(parent.stdout.readline())
            wait_until(mark.exists)
            assert is_alive(rank_pid)
        finally:
            parent.kill()
        wait_until(lambda: not is_alive(rank_pid))


def talk_to_rank(data: bytes) -> tuple[list[RankFrame], int]:
    """Send raw bytes to a rank; what it answers until it closes, and its exit status."""
    ours, theirs = socket.socketpair()
    with ours, subprocess.Popen([*FAKE_RANK, str(theirs.fileno())], pass_fds=[theirs.fileno()]) as rank:
        theirs.close()
        ours.sendall(data)
        ours.settimeout(DEADLINE_S)
        buffer, frames = FrameBuffer(), []
        try:
            while received := ours.recv(2**16):
                frames += [decode_rank_frame(body) for body in buffer.feed(received)]
        except ConnectionResetError:
            pass  # it left bytes unread
        return frames, rank.wait(DEADLINE_S)


def start_frame(version: int) -> bytes:
    return pack(Start(protocol_version=version, model=ModelRef(name="fake", digest="0"), engine={}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (start_frame(PROTOCOL_VERSION + 1), "restart the worker after an upgrade"),
        (LENGTH.pack(2**32 - 1), "frame of 4294967295 bytes announced"),
        (LENGTH.pack(3) + b"abc", "unreadable frame from the worker"),
        (start_frame(PROTOCOL_VERSION) * 2, "unexpected Start frame"),
    ],
)
def test_a_rank_refuses_what_it_does_not_understand(data: bytes, message: str) -> None:
    frames, status = talk_to_rank(data)
    assert isinstance(frames[-1], Fatal)
    assert message in frames[-1].message
    assert status == 1


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("pack(Hello(protocol_version=99,pid=1,credits=1,max_model_len=1,device='',kernels=()))", "speaks protocol 99"),
        ("b'\\0\\0\\0\\3abc'", "unreadable frame from the engine"),
    ],
)
def test_a_client_refuses_a_rank_that_it_does_not_understand(code: str, message: str) -> None:
    source = (
        "import socket, sys\nfrom engine.frames import Hello\nfrom engine.pipe import pack\n"
        f"sock = socket.socket(fileno=int(sys.argv[1])); sock.sendall({code}); sock.recv(10**6); sock.recv(1)"
    )
    client = EngineClient(ModelRef(name="x", digest="0"), EngineSettings(), command=(sys.executable, "-c", source))
    with pytest.raises(EngineError, match=message):
        client.start()


def test_a_command_that_does_not_exist_fails_at_once() -> None:
    client = EngineClient(ModelRef(name="x", digest="0"), EngineSettings(), command=("/does/not/exist",))
    with pytest.raises(EngineError, match="cannot start /does/not/exist"):
        client.start()


def test_a_hundred_engines_leave_no_descriptor_and_no_thread_behind() -> None:
    hello = Hello(protocol_version=PROTOCOL_VERSION, pid=1, credits=1, max_model_len=1, device="", kernels=())
    source = (  # a rank that starts in milliseconds
        "import socket, sys\nsock = socket.socket(fileno=int(sys.argv[1]))\n"
        f"sock.sendall(bytes.fromhex('{pack(hello).hex()}'))\nwhile b'Stop' not in sock.recv(10**6): pass"
    )
    num_before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(100):
        client = EngineClient(
            ModelRef(name="x", digest="0"), EngineSettings(), command=(sys.executable, "-S", "-E", "-c", source)
        )
        assert client.start() == hello
        client.stop()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == num_before
