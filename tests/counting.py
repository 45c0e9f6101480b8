"""Counts what Python does instead of timing it: the same on every machine, however busy."""

import cProfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

FILE_OPERATIONS = ("posix.", "_io.open")


class Work:
    """Calls made in a block of this thread, Python's and built-in ones, and those of them that ask for files."""

    num_calls = 0
    num_file_operations = 0

    def __init__(self) -> None:
        self.by_name: Counter[str] = Counter()


@contextmanager
def counted() -> Iterator[Work]:
    work, profile = Work(), cProfile.Profile()
    profile.enable()
    try:
        yield work
    finally:
        profile.disable()
    for entry in profile.getstats():
        name = entry.code if isinstance(entry.code, str) else f"{entry.code.co_filename}:{entry.code.co_name}"
        work.by_name[name] += entry.callcount
        work.num_calls += entry.callcount
        work.num_file_operations += entry.callcount * any(part in name for part in FILE_OPERATIONS)
