"""The choice of a backend: a reason for everything, an error for what cannot be had."""

import pytest
import torch

from kernels import select
from kernels.reference import ReferenceKernels
from kernels.select import Backend, BackendError, select_kernels

CPU = torch.device("cpu")


def test_auto_on_a_cpu_is_the_reference_with_reasons() -> None:
    kernels, choices = select_kernels(CPU, torch.float32, "auto")
    assert isinstance(kernels, ReferenceKernels)
    assert choices
    assert all(choice.operation and choice.backend and choice.reason for choice in choices)


@pytest.mark.parametrize("wanted", ["reference", "torch"])
def test_the_reference_can_be_asked_for_by_name(wanted: str) -> None:
    assert select_kernels(CPU, torch.bfloat16, wanted)[0].name == "reference"


def test_fp8_weights_without_fp8_products_are_computed_and_said_to_be_slow() -> None:
    kernels, choices = select_kernels(CPU, torch.float32, "auto", is_fp8=True)
    assert kernels.pack_projection(torch.ones(2, 2)).is_fp8
    assert any(choice.operation == "fp8 linear" and "deep_gemm" in choice.reason for choice in choices)


def test_an_unknown_backend_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match=r"unknown kernel backend 'cutlass'.*auto.*reference"):
        select_kernels(CPU, torch.float32, "cutlass")


def test_auto_falls_back_and_says_why_but_a_name_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: torch.device, dtype: torch.dtype, is_fp8: bool) -> object:
        raise BackendError(f"needs a CUDA device, not {device}")

    reference = next(backend for backend in select.BACKENDS if backend.name == "reference")
    monkeypatch.setattr(select, "BACKENDS", (Backend("fast", refuse), reference))  # type: ignore[arg-type]
    kernels, choices = select_kernels(CPU, torch.float32, "auto")
    assert kernels.name == "reference"
    assert any("needs a CUDA device" in choice.reason for choice in choices)
    with pytest.raises(BackendError, match="needs a CUDA device, not cpu"):
        select_kernels(CPU, torch.float32, "fast")


def test_the_reference_is_batch_invariant_on_a_cpu() -> None:
    for wanted in ("auto", "reference", "torch"):
        kernels, (choice,) = select_kernels(CPU, torch.float32, wanted, is_invariant=True)
        assert (kernels.name, choice.backend) == ("invariant", "invariant")
    with pytest.raises(BackendError, match=r"'hopper' is not batch-invariant.*auto"):
        select_kernels(CPU, torch.float32, "hopper", is_invariant=True)
