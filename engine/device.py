"""Everything that depends on the device: which one, its threads, its memory, its sizes where settings are 0."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from schemas.errors import SettingsError
from schemas.settings import EngineSettings

GIB = 2**30
ALIGNMENT_BYTES = 16
CPU_KV_CACHE_GIB = 2.0
GPU_MEMORY_FRACTION = 0.9  # of what is free once the weights are loaded; activations and logits live in the rest


@dataclass(frozen=True)
class EngineSizes:
    """Resolved sizes of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    block_size: int


def select_device(settings: EngineSettings, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """Resolve this rank's device and set the number of CPU threads. Raises SettingsError if it is absent.

    Ranks have the GPUs from ``settings.device`` on, one each; on a CPU they share the cores.
    """
    torch.set_num_threads(settings.num_threads or _default_num_threads(num_ranks))
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda" and num_ranks > 1:
            device = _device_of_rank(device.index or 0, rank, num_ranks)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise SettingsError(f"engine.device {settings.device!r} cannot be used: {error}") from error
    return device


def gpu_uuids(device: torch.device) -> tuple[str, ...]:
    """The UUIDs, as NVML writes them, of the GPUs that ``device`` means; none for a CPU."""
    return (f"GPU-{torch.cuda.get_device_properties(device).uuid}",) if device.type == "cuda" else ()


def _default_num_threads(num_ranks: int) -> int:
    """What OMP_NUM_THREADS says, as for every program that computes with torch; else a rank's share of the cores."""
    told = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(told) if told.isdecimal() and int(told) else max(1, len(os.sched_getaffinity(0)) // num_ranks)


def _device_of_rank(first: int, rank: int, num_ranks: int) -> torch.device:
    if first + num_ranks > (num_devices := torch.cuda.device_count()):
        raise SettingsError(
            f"an engine of {num_ranks} ranks needs as many GPUs from cuda:{first} on, this machine has {num_devices}: "
            "lower engine.data_parallel, tensor_parallel or context_parallel"
        )
    device = torch.device("cuda", first + rank)
    torch.cuda.set_device(device)
    return device


def resolve_sizes(settings: EngineSettings, device: torch.device, *, block_size: int) -> EngineSizes:
    """Fill in the sizes that settings leave at 0; call it after the weights are loaded.

    ``block_size`` is what the model's attention is fastest with.
    """
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.empty_cache()  # loading leaves behind what weights were made of: for V3, as much as a layer twice
    if settings.kv_cache_gib:
        kv_cache_bytes = int(settings.kv_cache_gib * GIB)
    elif is_gpu:
        kv_cache_bytes = int(GPU_MEMORY_FRACTION * torch.cuda.mem_get_info(device)[0])
    else:
        kv_cache_bytes = int(CPU_KV_CACHE_GIB * GIB)
    return EngineSizes(
        max_num_seqs=settings.max_num_seqs or (1024 if is_gpu else 64),
        max_num_batched_tokens=settings.max_num_batched_tokens or (4096 if is_gpu else 512),
        kv_cache_bytes=kv_cache_bytes,
        block_size=settings.block_size or block_size,
    )


def to_device(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Move arrays of one dtype to the device in one transfer; the tensors are views of one buffer, in shape.

    Each begins at a multiple of ALIGNMENT_BYTES: GPU kernels are compiled anew for another alignment. On a CPU nothing
    moves: the tensors are views of the arrays.
    """
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    step = ALIGNMENT_BYTES // next(iter(arrays.values())).itemsize
    sizes = [-(-array.size // step) * step for array in arrays.values()]
    flat = torch.empty(sum(sizes), dtype=_torch_dtype(arrays), pin_memory=True)
    for part, array in zip(torch.split(flat, sizes), arrays.values(), strict=True):
        part.numpy()[: array.size] = array.ravel()
    parts = torch.split(flat.to(device, non_blocking=True), sizes)
    return {
        name: part[: array.size].view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)
    }


def _torch_dtype(arrays: Mapping[str, np.ndarray]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=next(iter(arrays.values())).dtype)).dtype


class ToHost:
    """A tensor on its way to the host; who reads it waits for that alone, not for what was launched later."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._was_copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._was_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._was_copied.record()

    def read(self) -> list[Any]:
        """Wait for the values, and return them as nested lists."""
        if self._was_copied is not None:
            self._was_copied.synchronize()
        values: list[Any] = self._copy.tolist()
        return values
