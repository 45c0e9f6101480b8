"""Compiled grammars on this machine's disk, for the next worker and the next night. Knows no grammar engine.

A file holds its checksum: one that was cut, changed or written by something else is not used. No disk is no failure.
"""

import hashlib
import os
import tempfile
import zlib
from pathlib import Path

import structlog

log = structlog.get_logger()

MAX_FILES = 2_000
"""The least recently used go first."""
SUFFIX = ".grammar"


class GrammarFiles:
    """One directory, which any number of workers share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, name: str) -> str | None:
        """The text that was written under ``name``; None if there is none, or none that can be trusted."""
        path = self._directory / (name + SUFFIX)
        try:
            content = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        digest, packed = content[: hashlib.sha256().digest_size], content[hashlib.sha256().digest_size :]
        if hashlib.sha256(packed).digest() != digest:
            log.warning("grammar_file_ignored", path=str(path), reason="its checksum does not match")
            return None
        return zlib.decompress(packed).decode()

    def write(self, name: str, text: str) -> None:
        """Keep ``text``. A reader sees all of it or nothing."""
        packed = zlib.compress(text.encode(), level=1)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            staging, path = tempfile.mkstemp(dir=self._directory)
            try:
                with os.fdopen(staging, "wb") as file:
                    file.write(hashlib.sha256(packed).digest() + packed)
                os.replace(path, self._directory / (name + SUFFIX))
            except OSError:
                os.unlink(path)
                raise
            self._make_room()
        except OSError as error:
            log.warning("grammar_file_not_written", directory=str(self._directory), reason=str(error))

    def _make_room(self) -> None:
        files = [(path.stat().st_mtime, path) for path in self._directory.glob("*" + SUFFIX)]
        for _, path in sorted(files)[: max(0, len(files) - MAX_FILES)]:
            path.unlink(missing_ok=True)
