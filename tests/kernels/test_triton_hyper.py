"""Mixing streams in Triton against the reference: on a GPU, otherwise in Triton's interpreter."""

import pytest
import torch

from kernels.reference import ReferenceKernels

pytest.importorskip("triton", reason="triton is not installed")

from kernels.triton_dense import TritonKernels
from tests.kernels.test_triton_dense import DEVICE, draw


@pytest.mark.parametrize(("num_rows", "size"), [(0, 4), (3, 4), (70, 4), (5, 3), (5, 8)])
def test_streams_are_mixed_as_by_the_reference(num_rows: int, size: int) -> None:
    fused = draw(num_rows, size * size + 8, seed=1) * 3
    logits = fused[:, 8:].unflatten(1, (size, size))  # a view, as the model has it
    got = TritonKernels(DEVICE).sinkhorn(logits, 20, 1e-6)
    torch.testing.assert_close(got, ReferenceKernels(DEVICE).sinkhorn(logits, 20, 1e-6), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.sum(dim=-2), torch.ones(num_rows, size, device=DEVICE), atol=1e-4, rtol=0)
