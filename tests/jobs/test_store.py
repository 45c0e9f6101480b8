"""The store: whole files only, the first creation wins, errors say where and what to do."""

import errno
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import LocalStore, MemoryStore

from jobs import store as store_module
from jobs.store import (
    Bucket,
    LocalDirectory,
    Store,
    exists,
    open_store,
    probe,
    replace,
)
from jobs.store_errors import explained, is_transient
from schemas.errors import AlreadyExists, NotFound, StoreError


@pytest.fixture(params=["directory", "memory bucket", "file bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "directory":
        return open_store(str(tmp_path / "store"))
    (tmp_path / "bucket").mkdir()
    bucket = MemoryStore() if request.param == "memory bucket" else LocalStore(tmp_path / "bucket")
    return Bucket(bucket, "memory://test/some", "some")


def test_the_second_creation_of_a_key_fails_and_changes_nothing(store: Store) -> None:
    store.create("a/b.txt", b"first")
    with pytest.raises(AlreadyExists, match=r"b\.txt exists already"):
        store.create("a/b.txt", b"second")
    assert store.read("a/b.txt") == b"first"


def test_a_walk_finds_every_file_and_a_removed_root_has_none(store: Store) -> None:
    for key in ("a", "b/c", "b/d/e"):
        store.create(key, key.encode())
    assert sorted((entry.relative, entry.size_bytes) for entry in store.walk()) == [("a", 1), ("b/c", 3), ("b/d/e", 5)]
    assert {entry.relative for entry in store.within("b").walk()} == {"c", "d/e"}
    assert all(entry.modified_s > 1.7e9 for entry in store.walk())
    store.within("b").remove()
    assert [entry.relative for entry in store.walk()] == ["a"]
    store.within("b").remove()


def test_of_many_racing_creators_exactly_one_wins(store: Store) -> None:
    outcomes: list[bool] = []
    barrier = threading.Barrier(8)

    def create(name: str) -> None:
        barrier.wait()
        try:
            store.create("part", name.encode())
            outcomes.append(True)
        except AlreadyExists:
            outcomes.append(False)

    threads = [threading.Thread(target=create, args=(f"writer {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]


def test_a_key_can_be_read_listed_replaced_and_deleted(store: Store) -> None:
    store.create("x/1", b"one")
    replace(store, "x/2", b"two")
    replace(store, "x/2", b"zwei")
    inner = store.within("x")
    assert (inner.list(), store.list("x"), inner.read("2")) == (["1", "2"], ["1", "2"], b"zwei")
    with inner.open_reader("2") as file:
        file.seek(1)
        assert (file.read(), file.size()) == (b"wei", 4)
    entry = inner.stat("1")
    assert entry is not None
    assert (entry.size_bytes, entry.modified != "") == (3, True)
    inner.delete("1")
    inner.delete("1")
    assert (exists(store, "x/1"), store.stat("x/1"), store.list("nowhere")) == (False, None, [])
    with pytest.raises(NotFound, match="x/1"):
        store.read("x/1")
    with pytest.raises(NotFound, match="x/1"):
        store.open_reader("x/1").read()


def test_a_writer_that_fails_leaves_the_old_content(store: Store) -> None:
    replace(store, "out", b"old")
    with pytest.raises(ZeroDivisionError), store.open_writer("out") as file:
        raise ZeroDivisionError(file.write(b"new"))
    assert store.read("out") == b"old"


def test_the_probe_accepts_a_store_that_creates_exclusively_and_leaves_nothing(store: Store) -> None:
    probe(store)
    assert store.list("_staging") == []


def test_the_probe_refuses_a_store_that_overwrites(tmp_path: Path) -> None:
    class Overwriting(LocalDirectory):
        def create(self, key: str, data: bytes) -> None:
            replace(self, key, data)

    with pytest.raises(StoreError, match="choose another jobs_root"):
        probe(Overwriting(tmp_path))


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_without_hard_links_creation_is_still_exclusive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    store = LocalDirectory(tmp_path)
    store.create("a", b"first")
    with pytest.raises(AlreadyExists):
        store.create("a", b"second")
    assert (store.read("a"), store.list("_staging")) == (b"first", [])


def test_a_link_that_nfs_repeated_counts_as_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    LocalDirectory(tmp_path).create("a", b"first")
    assert (tmp_path / "a").read_bytes() == b"first"


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free space, then resume"), (errno.EROFS, "read-only"), (errno.EACCES, "permission denied")],
)
def test_a_full_or_forbidden_disk_fails_at_once_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str
) -> None:
    calls = []

    def fail(descriptor: int) -> None:
        calls.append(descriptor)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=advice) as caught:
        LocalDirectory(tmp_path).create("parts/a", b"data")
    assert str(tmp_path / "parts" / "a") in str(caught.value)
    assert (len(calls), list((tmp_path / "_staging").iterdir())) == (1, [])


def test_a_passing_fault_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, faults = os.fsync, [errno.ESTALE, errno.EAGAIN]

    def flaky(descriptor: int) -> None:
        if faults:
            raise OSError(faults.pop(), "not now")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flaky)
    LocalDirectory(tmp_path).create("a", b"data")
    assert (tmp_path / "a").read_bytes() == b"data"


def test_a_retry_that_finds_its_own_earlier_write_has_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, faults = store_module._sync_directory, [errno.ESTALE]

    def lose_the_reply(path: Path) -> None:
        if faults:
            raise OSError(faults.pop(), "stale handle")
        sync(path)

    monkeypatch.setattr(store_module, "_sync_directory", lose_the_reply)
    LocalDirectory(tmp_path).create("a", b"data")
    with pytest.raises(AlreadyExists):
        LocalDirectory(tmp_path).create("a", b"data")


def test_a_writer_whose_staging_file_is_swept_away_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a job is finished while a worker that was given up still writes its part."""
    store, fsync, sweeps = LocalDirectory(tmp_path), os.fsync, [1, 2]

    def sweeping(descriptor: int) -> None:
        fsync(descriptor)
        if sweeps:
            sweeps.pop()
            store.sweep(0.0)

    monkeypatch.setattr(os, "fsync", sweeping)
    store.create("a", b"created")
    replace(store, "b", b"replaced")
    assert (store.read("a"), store.read("b"), sweeps) == (b"created", b"replaced", [])
    sweeps.append(1)
    with pytest.raises(StoreError, match="swept away") as failed, store.open_writer("c") as file:
        file.write(b"streamed")
    assert is_transient(failed.value)


def test_a_sweep_takes_what_is_old_by_a_clock_that_may_go_back_and_is_its_own(tmp_path: Path) -> None:
    store, now_s = LocalDirectory(tmp_path), time.time()
    old, young, future = (f"{name}-{uuid.uuid4().hex}.parquet" for name in ("old", "young", "future"))
    ages_s = {old: 7200.0, young: 60.0, future: -7200.0, "table-of-another-program.parquet": 7200.0}
    for name, age_s in ages_s.items():
        store.create(f"_staging/{name}", b"")
        os.utime(tmp_path / "_staging" / name, (now_s - age_s, now_s - age_s))
    store.sweep()
    assert store.list("_staging") == [future, "table-of-another-program.parquet", young]
    store.sweep(0.0)
    assert store.list("_staging") == ["table-of-another-program.parquet"]


def test_a_bucket_that_finds_the_clock_wrong_says_to_set_it() -> None:
    answer = "Error performing PUT\n<Code>RequestTimeTooSkewed</Code>"
    with (
        pytest.raises(StoreError, match=r"cannot write s3://b/k: Error performing PUT \(this machine's clock is wrong"),
        explained("write", "s3://b/k"),
    ):
        raise GenericError(answer)


def test_only_passing_faults_are_transient() -> None:
    assert is_transient(OSError(errno.ETIMEDOUT, ""))
    assert not any(is_transient(OSError(code, "")) for code in (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT))
    assert not is_transient(ValueError())


CRASH = """
import os, sys
from pathlib import Path
from jobs import store
point = sys.argv[2]
def crash_at(module, name, call):
    original, calls = getattr(module, name), []
    def wrapped(*args, **kwargs):
        calls.append(1)
        if point == f"before-{name}" and len(calls) == call: os._exit(137)
        result = original(*args, **kwargs)
        if point == f"after-{name}" and len(calls) == call: os._exit(137)
        return result
    setattr(module, name, wrapped)
crash_at(os, "fsync", 1); crash_at(os, "link", 1); crash_at(store, "_sync_directory", 1)
store.LocalDirectory(Path(sys.argv[1])).create("parts/p", b"x" * 100_000)
"""


@pytest.mark.parametrize(
    ("point", "is_there"),
    [
        ("before-fsync", False),
        ("after-fsync", False),
        ("before-link", False),
        ("after-link", True),
        ("before-_sync_directory", True),
        ("after-_sync_directory", True),
    ],
)
def test_a_kill_at_any_point_leaves_a_whole_file_or_none(
    tmp_path: Path, repo_root: Path, point: str, is_there: bool
) -> None:
    process = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), point], cwd=repo_root, check=False)
    assert process.returncode == 137
    store = LocalDirectory(tmp_path)
    assert store.list("parts") == (["p"] if is_there else [])
    if is_there:
        assert store.read("parts/p") == b"x" * 100_000
    else:
        store.create("parts/p", b"again")
    left_behind = store.list("_staging")
    store.sweep()
    assert store.list("_staging") == left_behind  # its writer may be alive
    store.sweep(min_age_s=0)
    assert not (tmp_path / "_staging").exists()


def test_an_object_that_fails_to_read_names_its_uri() -> None:
    bucket = MemoryStore()
    obstore.put(bucket, "x", b"1")
    with pytest.raises(NotFound, match="s3://bucket/gone"):
        Bucket(bucket, "s3://bucket").read("gone")
