"""Cut a byte stream into frames and frames into bytes. Knows no sockets and no meaning of a frame."""

import struct
from collections.abc import Iterator

from engine.frames import MAX_FRAME_BYTES, ClientFrame, RankFrame, encode
from schemas.errors import EngineError

LENGTH = struct.Struct(">I")


def pack(frame: ClientFrame | RankFrame) -> bytes:
    """Encode a frame, its length in front. Raises EngineError if it is too large, UnicodeEncodeError for surrogates."""
    body = encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise EngineError(
            f"{type(frame).__name__} frame is {len(body)} bytes, limit {MAX_FRAME_BYTES}: send less at once"
        )
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Collects what a socket delivers and yields the bodies of complete frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add ``data``; yield each frame body that is now complete. Raises EngineError for an impossible length."""
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._bytes)
            if size > MAX_FRAME_BYTES:
                raise EngineError(
                    f"frame of {size} bytes announced, limit {MAX_FRAME_BYTES}: the peer is no Nightmill process"
                )
            end = LENGTH.size + size
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            yield body
