"""What pyarrow asks of a Python file, over obstore's reader and writer. Knows no keys and opens nothing."""

from typing import Any


class ObjectFile:
    """What pyarrow asks of a Python file, over obstore's reader."""

    closed = False

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self, size: int = -1) -> bytes:
        return bytes(self._reader.readall() if size < 0 else self._reader.read(size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())

    def close(self) -> None:
        self.closed = True
        self._reader.close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False


class ObjectSink:
    """What pyarrow asks of a file it writes, over obstore's writer. Only ``finish`` makes the object appear."""

    closed = False

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def write(self, data: Any) -> int:
        self._writer.write(bytes(data))
        return len(data)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self.closed = True

    def finish(self) -> None:
        self._writer.close()

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True
