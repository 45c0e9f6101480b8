import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs import broker
from jobs.broker import broker_status, broker_url, ensure_broker, main, stop_broker
from jobs.queue import connect
from schemas.errors import BrokerError
from schemas.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("NIGHTMILL_STATE_DIR", str(tmp_path / "state"))
    settings = Settings.load()
    yield settings
    stop_broker(settings)


def kill_server(settings: Settings) -> int:
    """SIGKILL the server; returns once nobody answers."""
    pid = broker_status(settings).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while broker_status(settings).pid == pid:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pid


def test_many_starters_at_once_get_one_server(settings: Settings) -> None:
    code = "from jobs.broker import *; s = Settings.load(); print(ensure_broker(s), broker_status(s).pid)"
    command = [sys.executable, "-c", code]
    with ThreadPoolExecutor(4) as pool:
        runs = pool.map(lambda _: subprocess.run(command, capture_output=True, text=True, check=True), range(4))
    assert {run.stdout for run in runs} == {f"{broker_url(settings)} {broker_status(settings).pid}\n"}


def test_the_server_survives_the_process_that_started_it_and_a_kill_keeps_its_data(settings: Settings) -> None:
    command = [sys.executable, "-c", "from jobs.broker import *; print(ensure_broker(Settings.load()))"]
    url = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with connect(url) as client:
        for value in range(100):
            client.set("kept", value)
    first_pid = kill_server(settings)
    assert ensure_broker(settings) == url
    assert broker_status(settings).pid != first_pid
    with connect(url) as client:
        assert client.get("kept") == b"99"


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(settings: Settings) -> None:
    url = ensure_broker(settings)
    kill_server(settings)
    assert Path(url.removeprefix("redis+socket://")).exists()
    ensure_broker(settings)
    pid = broker_status(settings).pid
    ensure_broker(settings)
    assert broker_status(settings).pid == pid


def test_the_server_holds_the_lock_for_as_long_as_it_lives(settings: Settings) -> None:
    ensure_broker(settings)
    data_dir = broker._data_dir(settings)
    with broker._try_lock(data_dir) as lock_fd:
        assert lock_fd is None
    assert stop_broker(settings)
    with broker._try_lock(data_dir) as lock_fd:
        assert lock_fd is not None
    assert not stop_broker(settings)


def test_a_stopped_server_leaves_nothing_in_the_runtime_directory(settings: Settings) -> None:
    ensure_broker(settings)
    directory = broker._current_socket(settings).parent
    assert directory.exists()
    stop_broker(settings)
    assert not directory.exists()
    ensure_broker(settings)


def test_another_login_session_finds_the_running_server(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = ensure_broker(settings)
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    assert ensure_broker(settings) == url


def test_a_long_state_directory_is_no_problem_and_a_long_runtime_directory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path.joinpath(*["directory" * 5] * 4)
    deep.mkdir(parents=True)
    settings = Settings(state_dir=deep)
    try:
        with connect(ensure_broker(settings)) as client:
            assert client.ping()
    finally:
        stop_broker(settings)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(BrokerError, match="longer than 107 bytes: point XDG_RUNTIME_DIR"):
        ensure_broker(Settings(state_dir=tmp_path / "other"))


def test_a_server_that_cannot_start_is_reported_with_its_log(settings: Settings) -> None:
    ensure_broker(settings)
    stop_broker(settings)
    data = broker._data_dir(settings) / "appendonlydir"
    for path in data.iterdir():
        path.write_bytes(b"this is no append-only file\n" * 3)
    with pytest.raises(BrokerError, match=r"did not start; the end of its log:\n[\s\S]*[Bb]ad|[Ff]ormat|[Ii]nvalid"):
        ensure_broker(settings)


def test_a_foreign_socket_directory_is_refused(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = broker._socket_path(broker._data_dir(settings)).parent
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    with pytest.raises(BrokerError, match="not a private directory"):
        ensure_broker(settings)


@pytest.mark.parametrize(
    "url", ["redis://host/3", "redis+socket:///run/redis.sock", "redis+socket:///run/redis.sock?virtual_host=2"]
)
def test_a_configured_url_stays_as_it_is(url: str) -> None:
    assert broker_url(Settings(broker_url=url)) == url


def test_a_configured_broker_is_used_as_it_is_and_never_stopped() -> None:
    settings = Settings(broker_url="redis://:secret@example.org:6379/3")
    assert ensure_broker(settings) == broker_url(settings) == settings.broker_url
    with pytest.raises(BrokerError, match="not ours to stop"):
        stop_broker(settings)


def test_the_command_line_starts_shows_and_stops_the_server(settings: Settings) -> None:
    def run(verb: str) -> tuple[int, str]:
        result = CliRunner().invoke(main, [verb])
        return result.exit_code, result.output

    assert run("status") == (1, f"not running ({broker_url(settings)})\n")
    assert run("start") == (0, f"{broker_url(settings)}\n")
    code, text = run("status")
    assert code == 0
    assert f"pid {broker_status(settings).pid}, version" in text
    assert run("stop") == (0, "stopped\n")
    assert run("stop") == (0, "no broker was running\n")


def test_importing_the_launcher_loads_nothing_heavy() -> None:
    code = "import sys, jobs.broker; print([m for m in ('torch', 'celery', 'redis', 'pyarrow') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_inherited_lock_of_a_dying_child_delays_a_start_but_does_not_fail_it(settings: Settings) -> None:
    """redis#7674: after kill -9 during an AOF rewrite, the rewriting child still has the lock."""
    url = ensure_broker(settings)
    with connect(url) as client:
        for number in range(50):
            client.set(f"filler-{number}", os.urandom(100_000))
        client.bgrewriteaof()
    kill_server(settings)
    assert ensure_broker(settings) == url
    with connect(url) as client:
        assert client.dbsize() == 50
