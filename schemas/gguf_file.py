"""Read GGUF files: metadata at once, tensors on demand. Knows the container, not what the names mean.

The gguf package's reader takes two seconds for 49,152 vocabulary entries, this one a tenth; the package dequantises.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is in torch's order, ``start`` a byte of the file."""

    shape: tuple[int, ...]
    quantization: int  # ggml's type number
    start: int


class GgufFile:
    """A parsed GGUF file. Raises ModelError if it is not one, or is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _parse(self._data)
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise ModelError(f"cannot read {path} as GGUF: {error}") from error

    def read(self, name: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """Dequantise a tensor to float32 in torch's order. Raises ModelError for an unknown quantisation."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.quantization)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
            row_bytes = tensor.shape[-1] // block_values * block_bytes
            num_rows = prod(tensor.shape[:-1])
            raw = np.frombuffer(self._data, np.uint8, num_rows * row_bytes, tensor.start).reshape(num_rows, row_bytes)
            values = np.require(dequantize(raw, kind), np.float32, "W")  # unquantised: a view of the read-only file
            return values.reshape(tensor.shape)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise ModelError(f"{self.path}: cannot dequantise tensor {name}: {error}") from error


def _parse(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    cursor = _Cursor(data)
    magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(f"magic {magic!r}, version {version}; supported: GGUF versions 2 and 3")
    num_tensors, num_fields = struct.unpack_from("<QQ", data, 8)
    cursor.at = 24
    metadata = {cursor.string(): cursor.value(cursor.scalar("<I")) for _ in range(num_fields)}
    headers = {}
    for _ in range(num_tensors):
        name = cursor.string()
        shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
        headers[name] = shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q")
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // alignment) * alignment
    return metadata, {name: GgufTensor(shape, kind, start + at) for name, (shape, kind, at) in headers.items()}


class _Cursor:
    """A read position in the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        end = self.at + size
        if end > len(self.data):
            raise ValueError(f"a string of {size} bytes at {self.at} runs past the end")
        text = self.data[self.at : end].decode("utf-8")
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item_kind, size = self.scalar("<I"), self.scalar("<Q")
        if item_kind in _SCALARS:
            dtype = np.dtype(_SCALARS[item_kind])
            values = np.frombuffer(self.data, dtype, size, self.at).tolist()
            self.at += size * dtype.itemsize
            return values
        return [self.value(item_kind) for _ in range(size)]
