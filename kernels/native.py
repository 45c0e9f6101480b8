"""bfloat16 on a CPU: what a step does beside matrix products as one loop each, compiled on this machine.

native.cpp is compiled once for each processor and kept; everything else is the reference. Knows nothing of models.
"""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kernels.api import AttentionBatch, HeadNorms
from kernels.compiled import compiled_directory
from kernels.reference import ReferenceKernels

SOURCES = tuple(Path(__file__).with_name(name) for name in ("native.cpp", "native_attention.cpp"))
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILERS = ("c++", "g++", "clang++")
COMPILE_S = 60.0

TILE_ROWS = 16
TILED_SIZES = (32, 64, 96, 128)
"""Of heads, which attention on tiles takes."""
NO_WINDOW = 2**31 - 1


class CompileError(Exception):
    """The loops cannot be had on this machine; the message says why."""


class NativeKernels(ReferenceKernels):
    """The reference with operations of native.cpp; tensors that these do not take go to the reference."""

    name = "native"

    def __init__(self, *, is_fp8: bool = False) -> None:
        """Raises CompileError."""
        super().__init__(torch.device("cpu"), torch.bfloat16, is_fp8=is_fp8)
        self._native = load_native()
        self.has_tiles = bool(self._native.allow_tiles())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm."""
        if not _are_rows(x, weight):
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm; overwrites ``residual``."""
        if not _are_rows(x, residual, weight) or x.shape != residual.shape:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, residual, weight, eps), residual

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out, size = torch.empty_like(x), x.shape[-1]
        self._native.rms_norm(
            _at(x), _at(residual), _at(weight), _float(eps), _int(x.numel() // size), _int(size), _at(out), _threads()
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels.silu_mul."""
        if not _are_rows(gate_up):
            return super().silu_mul(gate_up)
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._native.silu_mul(_at(gate_up), _int(out.numel() // size), _int(size), _at(out), _threads())
        return out

    def rotary_write_kv(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor], *, cache: Tensor, slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """See Kernels.rotary_write_kv."""
        cos, sin = cos_sin
        (num_rows, num_heads, size), num_groups = q.shape, k.shape[1]
        are_heads = all(x.dtype == torch.bfloat16 and x.stride()[1:] == (size, 1) for x in (q, k, v))
        if not are_heads or not _are_rows(cos, sin, cache):
            return super().rotary_write_kv(q, k, v, cos_sin, cache=cache, slots=slots, norms=norms)
        out = q.new_empty(q.shape)
        strides = (ctypes.c_int64 * 3)(q.stride(0), k.stride(0), v.stride(0))
        weights = (_at(norms.q), _at(norms.k), _float(norms.eps)) if norms else (None, None, _float(0))
        sizes = map(_int, (num_rows, num_heads, num_groups, size))
        self._native.rotary_write_kv(
            _at(q), _at(k), _at(v), strides, _at(cos), _at(sin), *weights, _at(slots), *sizes, _at(out), _at(cache[0]),
            _at(cache[1]), _threads(),
        )  # fmt: skip
        return out

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """See Kernels.attention."""
        block_size, num_groups, size = cache.shape[2:]
        fits = size in TILED_SIZES and block_size % TILE_ROWS == 0
        if not self.has_tiles or not fits or not _are_rows(q, cache):
            return super().attention(q, cache, batch, scale=scale, window=window)
        out = torch.empty_like(q)
        table = batch.block_table.contiguous()
        sizes = map(_int, (*table.shape, block_size, q.shape[1], num_groups, size, window or NO_WINDOW))
        self._native.attention(
            _at(q), _at(cache[0]), _at(cache[1]), _at(table), _at(batch.query_starts), _at(batch.seq_lens),
            *sizes, _float(scale), _at(out), _threads(),
        )  # fmt: skip
        return out


@cache
def load_native() -> ctypes.CDLL:
    """The compiled native.cpp. Raises CompileError with the cause."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise CompileError(f"no C++ compiler ({', '.join(COMPILERS)}) on the path")
    texts = [source.read_text() for source in SOURCES]
    digest = hashlib.sha256("\0".join((*texts, *FLAGS, compiler, _processor())).encode()).hexdigest()
    folder = compiled_directory()
    library = folder / f"native-{digest[:16]}.so"
    try:
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch, library.name)
                command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
                made.replace(library)
        return ctypes.CDLL(str(library))
    except subprocess.CalledProcessError as error:
        raise CompileError(f"{compiler} failed: {error.stderr.strip()[-300:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"native.cpp cannot be compiled or loaded: {error}") from error


def _processor() -> str:
    """What -march=native depends on: a folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _are_rows(*tensors: Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if x is None else x.data_ptr())


def _threads() -> ctypes.c_int:
    return ctypes.c_int(torch.get_num_threads())


_int, _float = ctypes.c_int64, ctypes.c_float
