"""Choose a kernel backend once per process, with a printable reason. Knows the backends, not their operations.

BackendError is this package's own, since kernels import nothing of ours; the engine turns it into a KernelError.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.api import Choice, Kernels

if TYPE_CHECKING:
    from kernels.reference import ReferenceKernels


class BackendError(Exception):
    """A backend is unknown, or was asked for by name and cannot be had; the message names the cause."""


@dataclass(frozen=True)
class Backend:
    """A backend that can be asked for by name. ``open`` raises BackendError with the cause if it cannot be had."""

    name: str
    open: Callable[[torch.device, torch.dtype, bool], tuple[Kernels, tuple[Choice, ...]]]
    aliases: tuple[str, ...] = ()


def select_kernels(
    device: torch.device, dtype: torch.dtype, wanted: str, *, is_fp8: bool = False, is_invariant: bool = False
) -> tuple[Kernels, tuple[Choice, ...]]:
    """Open the backend ``wanted``, or for "auto" the first of the registry that can be had.

    ``is_fp8``: projections and experts have fp8 weights and round what they multiply to fp8. ``is_invariant``: a row's
    bits do not depend on the batch, for which the reference on a CPU and Triton on a GPU have operations of their own.
    Raises BackendError for an unknown name, or for a named backend that cannot be had, with the cause.
    """
    if is_invariant:
        of_device, open_invariant = _open_reference, _open_invariant
        if device.type == "cuda":
            of_device, open_invariant = _open_triton, _open_triton_invariant
        if wanted != "auto" and _find(wanted).open is not of_device:
            raise BackendError(f"{wanted!r} is not batch-invariant: with --deterministic leave engine.kernels at auto")
        return open_invariant(device, dtype, is_fp8)
    if wanted != "auto":
        return _find(wanted).open(device, dtype, is_fp8)
    causes = []
    for backend in BACKENDS:
        try:
            kernels, choices = backend.open(device, dtype, is_fp8)
        except BackendError as error:
            causes.append(f"{backend.name}: {error}")
        else:
            skipped = tuple(Choice("fallback", backend.name, cause) for cause in causes)
            return kernels, (*choices, *skipped)
    raise BackendError(f"no kernel backend for {dtype} on {device}: {'; '.join(causes)}")


def _find(wanted: str) -> Backend:
    for backend in BACKENDS:
        if wanted == backend.name or wanted in backend.aliases:
            return backend
    known = ", ".join(["auto", *(backend.name for backend in BACKENDS)])
    raise BackendError(f"unknown kernel backend {wanted!r}: engine.kernels must be one of {known}")


def _open_reference(device: torch.device, dtype: torch.dtype, is_fp8: bool) -> tuple[Kernels, tuple[Choice, ...]]:
    from kernels.reference import ReferenceKernels

    kernels = ReferenceKernels(device, dtype, is_fp8=is_fp8)
    return kernels, _reference_choices(kernels, device, is_fp8)


def _reference_choices(kernels: "ReferenceKernels", device: torch.device, is_fp8: bool) -> tuple[Choice, ...]:
    dtype = kernels.dtype
    if kernels.can_prepack:
        linear = Choice("linear", "onednn", f"prepacked {dtype} weights agree with torch on this CPU and are faster")
    elif device.type == "cpu":
        linear = Choice("linear", "torch", f"oneDNN takes no prepacked {dtype} weights on this CPU")
    else:
        linear = Choice("linear", "torch", f"cuBLAS through torch on {device}")
    return (*_fp8_choice(dtype, is_fp8), linear, Choice("everything else", "reference", f"plain torch on {device}"))


def _open_native(device: torch.device, dtype: torch.dtype, is_fp8: bool) -> tuple[Kernels, tuple[Choice, ...]]:
    if device.type != "cpu" or dtype != torch.bfloat16:
        raise BackendError(f"its loops compute in bfloat16 on a CPU, not in {dtype} on {device}")
    from kernels.native import TILED_SIZES, CompileError, NativeKernels

    try:
        kernels = NativeKernels(is_fp8=is_fp8)
    except CompileError as error:
        raise BackendError(str(error)) from error
    fused = Choice("norms, rotary, silu", "native", "one loop each, compiled for this processor")
    attention = Choice("attention", "reference", "plain torch: this processor, or its system, has no AMX tiles")
    if kernels.has_tiles:
        attention = Choice("attention", "native", f"AMX tiles, for heads of {TILED_SIZES} in bfloat16")
    return kernels, (fused, attention, *_reference_choices(kernels, device, is_fp8))


def _open_invariant(device: torch.device, dtype: torch.dtype, is_fp8: bool) -> tuple[Kernels, tuple[Choice, ...]]:
    from kernels.invariant import InvariantKernels

    reason = f"batch-invariant: plain torch on {device}, products on tiles of fixed shape"
    return InvariantKernels(device, dtype, is_fp8=is_fp8), (
        *_fp8_choice(dtype, is_fp8),
        Choice("everything", "invariant", reason),
    )


def _open_triton_invariant(
    device: torch.device, dtype: torch.dtype, is_fp8: bool
) -> tuple[Kernels, tuple[Choice, ...]]:
    _open_triton(device, dtype, is_fp8)  # raises where Triton is not
    from kernels.triton_invariant import InvariantTritonKernels

    reason = f"batch-invariant: each sum in one order, on {torch.cuda.get_device_name(device)}"
    return InvariantTritonKernels(device, dtype, is_fp8=is_fp8), (
        *_fp8_choice(dtype, is_fp8),
        Choice("everything", "triton-invariant", reason),
    )


def _open_triton(device: torch.device, dtype: torch.dtype, is_fp8: bool) -> tuple[Kernels, tuple[Choice, ...]]:
    if device.type != "cuda":
        raise BackendError(f"its kernels need an NVIDIA GPU, not {device}")
    try:
        from kernels.triton_dense import TritonKernels
    except ImportError as error:
        raise BackendError(f"triton cannot be imported: {error}") from error
    linear = Choice("linear", "torch", f"cuBLAS through torch on {device}")
    fused = Choice("everything else", "triton", f"fused kernels on {torch.cuda.get_device_name(device)}")
    return TritonKernels(device, dtype, is_fp8=is_fp8), (*_fp8_choice(dtype, is_fp8), linear, fused)


def _fp8_choice(dtype: torch.dtype, is_fp8: bool) -> tuple[Choice, ...]:
    """Of a backend that has no fp8 products."""
    reason = f"computed as what the codes stand for, at the speed of {dtype}: deep_gemm on a Hopper GPU is faster"
    return (Choice("fp8 linear", "reference", reason),) if is_fp8 else ()


def _open_hopper(device: torch.device, dtype: torch.dtype, is_fp8: bool) -> tuple[Kernels, tuple[Choice, ...]]:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        raise BackendError(f"its libraries are built for compute capability 9.0 (H100, H200), not for {device}")
    if dtype != torch.bfloat16:
        raise BackendError(f"its libraries compute in bfloat16, not in {dtype}")
    _, triton_choices = _open_triton(device, dtype, False)
    from kernels.hopper import FP8_DEPTH, HopperKernels, load_libraries

    libraries, choices = load_libraries()
    if all(choice.backend == "triton" for choice in choices):
        raise BackendError("; ".join(choice.reason for choice in choices))
    if is_fp8:
        if libraries.deep_gemm is None:
            triton_choices = (*_fp8_choice(dtype, is_fp8), *triton_choices)
        else:
            fp8 = Choice("fp8 linear", "deep_gemm", f"inputs of {FP8_DEPTH} times any values; others as the reference")
            choices = (*choices, fp8)
    return HopperKernels(device, dtype, libraries, is_fp8=is_fp8), (*choices, *triton_choices)


BACKENDS = (
    Backend("hopper", _open_hopper),
    Backend("triton", _open_triton),
    Backend("native", _open_native),
    Backend("reference", _open_reference, aliases=("torch",)),
)
"""In the order in which "auto" tries them: fastest first."""
