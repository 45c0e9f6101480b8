"""Where bytes lie: local directories and object-store buckets. The only module that opens files or buckets.

A file appears whole or not at all, and ``create`` never overwrites: the first wins. Knows no Parquet and no jobs.
"""

import contextlib
import ctypes
import errno
import functools
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast
from urllib.parse import unquote, urlsplit

import obstore
import pyarrow as pa
from obstore.store import MemoryStore, ObjectStore, from_url

from jobs.object_files import ObjectFile, ObjectSink
from jobs.store_errors import explained, retrying
from schemas.errors import AlreadyExists, InputDataError, NotFound, StoreError

STAGING = "_staging"
STAGED_NAME = re.compile(r"-[0-9a-f]{32}(\.\w+)?$")
"""Ends the names of our own staged files: others may keep a directory of that name where we write."""
READ_BUFFER_BYTES = 2**20
URI_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "memory")
NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})


class Entry(NamedTuple):
    """A stored file as it is now. ``relative`` is its path below the directory it was found under."""

    uri: str
    size_bytes: int
    modified: str  # modification time in ns, or the object's etag
    relative: str = ""
    modified_s: float = 0.0  # since 1970, by the clock of the file system or bucket


class Store(Protocol):
    """A tree of files under one root; keys are relative paths. Every error is a StoreError naming the path."""

    def within(self, name: str) -> "Store":
        """Return the store of a directory in this one."""

    def locate(self, key: str) -> str:
        """Return the path or URI of ``key``, for messages and for other readers."""

    def stat(self, key: str) -> Entry | None:
        """Return size and modification mark, or None if there is no such file."""

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted names of the files and directories directly in ``prefix``; none if it is missing."""

    def read(self, key: str) -> bytes:
        """Return the whole content. Raises NotFound."""

    def open_reader(self, key: str) -> pa.NativeFile:
        """Open for random reads. Raises NotFound."""

    def create(self, key: str, data: bytes) -> None:
        """Write a file that did not exist, durably. Raises AlreadyExists if somebody was first."""

    def open_writer(self, key: str) -> AbstractContextManager[IO[bytes]]:
        """Stream into a file that appears, or replaces the old one, only if the block ends without an exception."""

    def walk(self) -> tuple[Entry, ...]:
        """Return every file under the root; ``relative`` is its key."""

    def delete(self, key: str) -> None:
        """Delete a file; a missing one is fine."""

    def remove(self) -> None:
        """Delete the root and all that is left in it."""

    def sweep(self, min_age_s: float = 3600.0) -> None:
        """Delete what interrupted writers left behind; younger files may have a living writer."""


def open_store(root: str) -> Store:
    """Open a jobs root or output location: a directory, ``file://``, or an s3, gs, az or memory URI."""
    if (path := local_path(root)) is not None:
        return LocalDirectory(path)
    bucket, prefix = open_bucket(root)
    return Bucket(bucket, root.rstrip("/"), prefix)


def inner_key(key: str) -> str:
    """Return the key. Raises StoreError for one that leads out of its store."""
    if key.startswith("/") or ".." in key.split("/") or "\0" in key:
        raise StoreError(f"{key!r} leads out of its directory: no name of a job or a file may")
    return key


def exists(store: Store, key: str) -> bool:
    """Say whether ``key`` is stored."""
    return store.stat(key) is not None


def replace(store: Store, key: str, data: bytes) -> None:
    """Write a file, or swap its content in one step."""
    for attempt in retrying():
        with attempt, store.open_writer(key) as file:
            file.write(data)


def probe(store: Store) -> None:
    """Check that exclusive creation works here. Raises StoreError: without it two workers could both commit a chunk."""
    key = f"{STAGING}/probe-{uuid.uuid4().hex}"
    store.create(key, b"1")
    try:
        store.create(key, b"2")
    except AlreadyExists:
        return
    finally:
        store.delete(key)
    raise StoreError(f"{store.locate('')} lets a second writer overwrite a file: choose another jobs_root")


def _create(store: Store, write: Callable[[], None], key: str, data: bytes) -> None:
    """Create with retries; a retry that finds its own earlier write there has won."""
    for attempt in retrying():
        with attempt:
            try:
                write()
            except AlreadyExists:
                if attempt.retry_state.attempt_number == 1 or store.read(key) != data:
                    raise


class LocalDirectory:
    """A store in a directory of this machine or of a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def within(self, name: str) -> Store:
        return LocalDirectory(self._path(name))

    def locate(self, key: str) -> str:
        return str(self._path(key))

    def stat(self, key: str) -> Entry | None:
        path = self._path(key)
        try:
            with explained("look at", path):
                return local_entry(path) if path.is_file() else None
        except NotFound:
            return None

    def list(self, prefix: str = "") -> list[str]:
        path = self._path(prefix)
        try:
            with explained("list", path):
                return sorted(os.listdir(path))
        except NotFound:
            return []

    def read(self, key: str) -> bytes:
        for attempt in retrying():
            with attempt, explained("read", self._path(key)):
                return self._path(key).read_bytes()
        raise AssertionError("tenacity re-raises")

    def open_reader(self, key: str) -> pa.NativeFile:
        with explained("open", self._path(key)):
            return pa.OSFile(str(self._path(key)), "rb")

    def create(self, key: str, data: bytes) -> None:
        def write() -> None:
            with self._staged(key, _publish_new) as file:
                file.write(data)

        _create(self, write, key, data)

    @contextmanager
    def open_writer(self, key: str) -> Iterator[IO[bytes]]:
        with self._staged(key, os.replace) as file:
            yield file

    def open_log(self, key: str) -> IO[bytes]:
        """Open a new file that grows where all can see it, unbuffered. Raises AlreadyExists."""
        path = self._path(key)
        with explained("open", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("xb", buffering=0)

    def walk(self) -> tuple[Entry, ...]:
        with explained("list", self._root):
            paths = [Path(top) / name for top, _, names in os.walk(self._root) for name in names]
            return tuple(sorted(local_entry(path, self._root) for path in paths if not path.is_symlink()))

    def delete(self, key: str) -> None:
        with explained("delete", self._path(key)):
            self._path(key).unlink(missing_ok=True)

    def remove(self) -> None:
        with explained("delete", self._root), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root)

    def sweep(self, min_age_s: float = 3600.0) -> None:
        staging = self._root / STAGING
        with explained("sweep", staging):
            for path in [staging / name for name in self.list(STAGING) if STAGED_NAME.search(name)]:
                with contextlib.suppress(FileNotFoundError):  # its writer was quicker
                    if max(0.0, time.time() - path.stat().st_mtime) >= min_age_s:  # the clock may have gone back
                        path.unlink()
            with contextlib.suppress(OSError):  # missing, or not empty
                staging.rmdir()

    def _path(self, key: str) -> Path:
        return self._root / inner_key(key)

    @contextmanager
    def _staged(self, key: str, publish: Callable[[Path, Path], object]) -> Iterator[IO[bytes]]:
        """Write to a staging file, make it durable, publish it, make the publication durable."""
        target = self._path(key)
        with explained("write", target):
            file = self._open_staging(target)
            staged = Path(file.name)
            try:
                with file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                with _noticing_a_sweep(staged):
                    publish(staged, target)
                _sync_directory(target.parent)
            finally:
                staged.unlink(missing_ok=True)

    def _open_staging(self, target: Path) -> IO[bytes]:
        staged = self._root / STAGING / f"{target.stem}-{uuid.uuid4().hex}{target.suffix}"
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.parent.mkdir(parents=True, exist_ok=True)
        try:
            return staged.open("xb")
        except FileNotFoundError:  # a sweeper was between the two lines above
            staged.parent.mkdir(parents=True, exist_ok=True)
            return staged.open("xb")


@contextmanager
def _noticing_a_sweep(staged: Path) -> Iterator[None]:
    """Make it a transient error that somebody took the staged file for a dead writer's."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, "the staging file was swept away", str(staged)) from error


def _publish_new(staged: Path, target: Path) -> None:
    """Give the staged file its final name unless the name is taken: link(2) is atomic and fails if it exists."""
    try:
        os.link(staged, target)
    except FileExistsError as error:
        if staged.stat().st_nlink < 2:  # 2: NFS repeated our own successful link
            raise AlreadyExists(f"{target} exists already") from error
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        _rename_new(staged, target)


def _rename_new(staged: Path, target: Path) -> None:
    """Rename without replacing, for file systems that have no hard links."""
    at_cwd, noreplace = -100, 1
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and rename(at_cwd, os.fsencode(staged), at_cwd, os.fsencode(target), noreplace) == 0:
        return
    code = ctypes.get_errno() if rename is not None else errno.ENOSYS
    if code == errno.EEXIST:
        raise AlreadyExists(f"{target} exists already")
    if code in NO_HARD_LINKS:
        raise StoreError(
            f"the file system of {target} has neither hard links nor a rename that does not replace, "
            "so a chunk could be committed twice: choose another jobs_root"
        )
    raise OSError(code, os.strerror(code), str(target))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Bucket:
    """A store under a prefix of an object store. A put is whole or nothing, so nothing is staged."""

    def __init__(self, bucket: ObjectStore, uri: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._uri = uri
        self._prefix = prefix

    def within(self, name: str) -> Store:
        return Bucket(self._bucket, f"{self._uri}/{name}", self._key(name))

    def locate(self, key: str) -> str:
        return f"{self._uri}/{key}" if key else self._uri

    def stat(self, key: str) -> Entry | None:
        try:
            with explained("look at", self.locate(key)):
                return object_entry(obstore.head(self._bucket, self._key(key)), self.locate(key))
        except NotFound:
            return None

    def list(self, prefix: str = "") -> list[str]:
        with explained("list", self.locate(prefix)):
            found = obstore.list_with_delimiter(self._bucket, self._key(prefix) or None)
        paths = [str(item["path"]) for item in found["objects"]] + list(found["common_prefixes"])
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)

    def read(self, key: str) -> bytes:
        for attempt in retrying():
            with attempt, explained("read", self.locate(key)):
                return bytes(obstore.get(self._bucket, self._key(key)).bytes())
        raise AssertionError("tenacity re-raises")

    def open_reader(self, key: str) -> pa.NativeFile:
        with explained("open", self.locate(key)):
            return _open_object(self._bucket, self._key(key))

    def create(self, key: str, data: bytes) -> None:
        def write() -> None:
            with explained("write", self.locate(key)):
                obstore.put(self._bucket, self._key(key), data, mode="create", use_multipart=False)

        _create(self, write, key, data)

    @contextmanager
    def open_writer(self, key: str) -> Iterator[IO[bytes]]:
        with explained("write", self.locate(key)):
            sink = ObjectSink(obstore.open_writer(self._bucket, self._key(key)))
            yield cast("IO[bytes]", sink)
            sink.finish()  # not in a finally: an upload that is not closed never appears

    def walk(self) -> tuple[Entry, ...]:
        with explained("list", self._uri):
            found = obstore.list(self._bucket, self._prefix or None).collect()
        below = [(item, str(item["path"])[len(self._prefix) :].lstrip("/")) for item in found]
        return tuple(object_entry(item, self.locate(key), key) for item, key in below)

    def delete(self, key: str) -> None:
        try:
            with explained("delete", self.locate(key)):
                obstore.delete(self._bucket, self._key(key))
        except NotFound:
            pass

    def remove(self) -> None:
        for entry in self.walk():
            self.delete(entry.relative)

    def sweep(self, min_age_s: float = 3600.0) -> None:
        """Nothing: unfinished uploads are the bucket's lifecycle rule to remove."""

    def _key(self, key: str) -> str:
        return "/".join(part for part in (self._prefix, inner_key(key)) if part)


def open_input(uri: str) -> pa.NativeFile:
    """Open an input file for random reads. Raises NotFound or StoreError naming it."""
    if (path := local_path(uri)) is not None:
        return LocalDirectory(path.parent).open_reader(path.name)
    bucket, key = open_bucket(uri)
    with explained("open", uri):
        return _open_object(bucket, key)


def stat_input(uri: str) -> Entry | None:
    """Return an input file's size and modification mark as they are now, or None if it is gone."""
    if (path := local_path(uri)) is not None:
        return LocalDirectory(path.parent).stat(path.name)
    bucket, key = open_bucket(uri)
    try:
        with explained("look at", uri):
            return object_entry(obstore.head(bucket, key), uri)
    except NotFound:
        return None


def absolute_location(location: str) -> str:
    """Make a local path absolute; URIs stay as they are."""
    path = local_path(location)
    return location if path is None else str(path)


def local_entry(path: Path, base: Path | None = None) -> Entry:
    """Describe a local file found under ``base``."""
    info = path.stat()
    relative = path.relative_to(base).as_posix() if base else ""
    return Entry(str(path), info.st_size, str(info.st_mtime_ns), relative, info.st_mtime)


def object_entry(item: Any, uri: str, relative: str = "") -> Entry:
    """Describe an object from obstore's listing of it."""
    modified = item["last_modified"]
    return Entry(uri, int(item["size"]), str(item["e_tag"] or modified.isoformat()), relative, modified.timestamp())


def local_path(location: str) -> Path | None:
    """Return the absolute path of a local location, None for a URI. Raises InputDataError for an unknown scheme."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return Path(os.path.abspath(Path(location).expanduser()))
    if scheme == "file":
        return Path(os.path.abspath("/" + unquote(rest).partition("/")[2]))
    if scheme not in URI_SCHEMES:
        raise InputDataError(f"{location}: unknown scheme {scheme!r}, known are file, {', '.join(URI_SCHEMES)}")
    return None


def open_bucket(uri: str) -> tuple[ObjectStore, str]:
    """Return the bucket and the key in it; credentials come from the provider's usual environment variables."""
    parts = urlsplit(uri, allow_fragments=False)
    key = uri.partition("://")[2].partition("/")[2].strip("/")
    with explained("open", uri):
        return _bucket(f"{parts.scheme}://{parts.netloc}"), key


@functools.cache
def _bucket(url: str) -> ObjectStore:
    """Connect once per process and bucket; a memory bucket lives as long as the process."""
    return MemoryStore() if url.startswith("memory:") else from_url(url)


def _open_object(bucket: ObjectStore, key: str) -> pa.NativeFile:
    return pa.PythonFile(ObjectFile(obstore.open_reader(bucket, key, buffer_size=READ_BUFFER_BYTES)), mode="r")
