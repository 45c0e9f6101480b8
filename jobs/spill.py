"""Rows that are done in a chunk that is not committed, kept so that a worker's death does not repeat them.

Only ever an aid: a file that is torn, foreign or cannot be written costs time, never a row. Each attempt writes one
file of its own, and the part that is committed removes them all.
"""

import struct
import time
import uuid
import zlib
from pathlib import Path
from typing import IO

import msgspec
import structlog

from jobs.job import Job
from jobs.parts import version
from jobs.store import STAGING, LocalDirectory
from schemas.errors import StoreError
from schemas.records import FORMAT_VERSION, Chunk, Record, RowResult, RowStatus

FLUSH_S = 1.0
MAX_AGE_S = 7 * 24 * 3600.0  # of what nobody came back for
FRAME = struct.Struct("<II")  # length and CRC of what follows

log = structlog.get_logger(__name__)


class SpillHead(Record):
    """The first frame of a file: what its rows are results of, and what computed them."""

    job_id: str  # holds the hash of the whole spec
    chunk: Chunk
    version: str
    format_version: int = FORMAT_VERSION


class Spill:
    """One attempt's file, and those of the attempts before it; owned by the thread that runs the chunk."""

    def __init__(self, place: LocalDirectory, job_id: str, chunk: Chunk, flush_s: float = FLUSH_S) -> None:
        self._place = place
        self._head = _frame(SpillHead(job_id=job_id, chunk=chunk, version=version()))
        self._rows = range(chunk.start_row, chunk.start_row + chunk.num_rows)
        self._prefix = f"spill-{job_id}-{chunk.index:05d}-"
        self._key = f"{STAGING}/{self._prefix}{uuid.uuid4().hex}"
        self._flush_s = flush_s
        self._flush_at_s = time.monotonic() + flush_s
        self._buffer: list[bytes] = []
        self._doubtful: list[bytes] = []  # failed rows: the engine may be broken, and they be tried on another
        self._file: IO[bytes] | None = None
        self._is_broken = False

    def read(self) -> dict[int, RowResult]:
        """Return the rows that earlier attempts finished, by row index."""
        found: dict[int, RowResult] = {}
        for name in self._names():
            try:
                data = self._place.read(f"{STAGING}/{name}")
            except StoreError as error:
                log.warning("spill_unreadable", reason=str(error))
                continue
            if data.startswith(self._head):
                found |= {row.row_index: row for row in _rows_in(data, len(self._head)) if row.row_index in self._rows}
        return found

    def add(self, row: RowResult) -> None:
        """Keep a finished row; it is on its way to the disk within ``flush_s`` of the next call."""
        try:
            frame = _frame(row)
        except UnicodeEncodeError:
            return  # half of a surrogate pair: computed again
        if row.status is RowStatus.FAILED:
            self._doubtful.append(frame)
            return
        self._buffer += [*self._doubtful, frame]  # it serves others: the failed rows are to blame
        self._doubtful.clear()
        if time.monotonic() >= self._flush_at_s:
            self.flush()

    def close(self) -> None:
        """Write what is left, if there is a file: a chunk of less than ``flush_s`` is not worth one."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the files of all attempts: the chunk is committed."""
        for name in self._names():
            try:
                self._place.delete(f"{STAGING}/{name}")
            except StoreError as error:
                log.warning("spill_left_behind", reason=str(error))

    def _names(self) -> list[str]:
        try:
            return [name for name in self._place.list(STAGING) if name.startswith(self._prefix)]
        except StoreError as error:
            log.warning("spill_unreadable", reason=str(error))
            return []

    def flush(self) -> None:
        """Write what is left."""
        self._flush_at_s = time.monotonic() + self._flush_s
        frames, self._buffer = self._buffer, []
        if self._is_broken:
            return
        try:
            if self._file is None:
                self._place.sweep(MAX_AGE_S)
                self._file = self._place.open_log(self._key)
                frames.insert(0, self._head)
            data = b"".join(frames)
            self._is_broken = self._file.write(data) < len(data)  # what follows a torn frame could not be read
        except (StoreError, OSError) as error:
            self._is_broken = True
            log.warning("spill_given_up", reason=str(error))


def open_spill(job: Job, chunk: Chunk, state_dir: Path) -> Spill:
    """The spill of a new attempt: in the job's directory, for all workers, or on this machine if that is a bucket."""
    is_local = isinstance(job.store, LocalDirectory)
    place = job.store if is_local else LocalDirectory(state_dir.expanduser().absolute() / "spills")
    assert isinstance(place, LocalDirectory)
    return Spill(place, job.job_id, chunk)


def _frame(record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _rows_in(data: bytes, start: int) -> list[RowResult]:
    """The rows up to the first frame that is not whole."""
    rows: list[RowResult] = []
    while start + FRAME.size <= len(data):
        length, checksum = FRAME.unpack_from(data, start)
        payload = data[start + FRAME.size : start + FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            break
        try:
            rows.append(msgspec.msgpack.decode(payload, type=RowResult))
        except msgspec.MsgspecError:  # zeros, as a power cut leaves them
            break
        start += FRAME.size + length
    return rows
