"""Rows to fp8 in Triton against the reference."""

import pytest
import torch

from kernels import reference_fp8
from kernels.reference import ReferenceKernels

pytest.importorskip("triton", reason="triton is not installed")

from kernels import triton_fp8
from tests.kernels.test_triton_dense import DEVICE, HAS_GPU, draw


def assert_codes(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal; in Triton's interpreter, which cuts codes off instead of rounding them, not far away."""
    if HAS_GPU:
        num_others = int((got.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        assert num_others <= got.numel() / 1000, "but for ties of a division"
    assert (got.float() - wanted.float()).abs().le(wanted.float().abs() / 2 + 0.01).all()


@pytest.mark.parametrize("num_rows", [0, 1, 21])
def test_rows_equal_the_reference_with_scales_column_by_column(num_rows: int) -> None:
    x = draw(num_rows, 384, seed=1)[:, :256]
    codes, scales = triton_fp8.quantize_rows(x)
    wanted, wanted_scales = reference_fp8.quantize_rows(x)
    assert_codes(codes, wanted)
    torch.testing.assert_close(scales, wanted_scales)
    assert num_rows == 0 or scales.stride() == (1, -(-num_rows // 4) * 4)


def test_rows_are_gathered_and_rows_of_nobody_left_out() -> None:
    x = draw(5, 128, seed=2)
    sources = torch.tensor([3, 0, 0, 4, 1, 2, 2, 0], device=DEVICE)
    experts = torch.tensor([0, 0, -1, -1, 1, 1, -1, -1], dtype=torch.int32, device=DEVICE)
    codes, scales = triton_fp8.quantize_rows(x, sources=sources, experts=experts, num_runs=2)
    assert (codes.shape, scales.shape, scales.stride()) == ((2, 4, 128), (2, 4, 1), (4, 1, 4))
    wanted, wanted_scales = reference_fp8.quantize_rows(x)
    for (run, at), row in {(0, 0): 3, (0, 1): 0, (1, 0): 1, (1, 1): 2}.items():
        assert_codes(codes[run, at], wanted[row])
        torch.testing.assert_close(scales[run, at], wanted_scales[row])


def test_gate_and_up_meet_on_the_way() -> None:
    gate_up = draw(3, 512, seed=3)
    codes, scales = triton_fp8.quantize_rows(gate_up, is_gated=True)
    wanted, wanted_scales = reference_fp8.quantize_rows(ReferenceKernels().silu_mul(gate_up))
    assert_codes(codes, wanted)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-5, atol=0)
