"""Block-scaled fp8 against its definition, and projections and experts that use it."""

import pytest
import torch

from kernels import reference_fp8
from kernels.reference import ReferenceKernels


def test_a_row_has_a_scale_for_each_128_values_and_its_largest_is_exact() -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-3], [1.0], [1e3]])
    x[1, :128] = 0
    codes, scales = reference_fp8.quantize_rows(x)
    assert (codes.shape, scales.shape) == ((3, 300), (3, 3))
    for row in range(3):
        for group in range(3):
            part = slice(group * 128, min(300, group * 128 + 128))
            wanted = max(float(x[row, part].abs().max()) / 448, 1e-10)
            assert float(scales[row, group]) == pytest.approx(wanted)
            assert torch.equal(codes[row, part], (x[row, part] / scales[row, group]).to(torch.float8_e4m3fn))
    assert (reference_fp8.round_rows(x) - x).abs().le(x.abs() / 16 + 1e-6).all(), "three bits of mantissa"


@pytest.mark.parametrize("shape", [(130, 257), (2, 128, 128), (5, 40)])
def test_a_weight_has_a_scale_for_each_block_and_rounding_it_again_changes_nothing(shape: tuple[int, ...]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    codes, scales = reference_fp8.quantize_blocks(weight)
    assert codes.shape == weight.shape
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    rounded = reference_fp8.round_blocks(weight)
    assert 0.01 < float((rounded - weight).norm() / weight.norm()) < 0.05
    torch.testing.assert_close(reference_fp8.round_blocks(rounded), rounded, rtol=1e-6, atol=0)


def test_a_checkpoint_whose_scales_are_powers_of_two_is_taken_as_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    codes = (torch.randn(256, 128, generator=generator) * 60).clamp(-300, 300).to(torch.float8_e4m3fn)
    scales = torch.tensor([[2.0**-9], [2.0**-6]])
    weight = (codes.float() * scales.repeat_interleave(128, 0)).bfloat16()
    got, got_scales = reference_fp8.quantize_blocks(weight)
    assert torch.equal(got.float() * got_scales.repeat_interleave(128, 0), weight.float())


def test_projections_and_experts_multiply_codes_and_keep_the_head_as_it_is() -> None:
    kernels, exact = ReferenceKernels(is_fp8=True), ReferenceKernels()
    generator = torch.Generator().manual_seed(4)
    x, weight = torch.randn(6, 200, generator=generator), torch.randn(72, 200, generator=generator)
    bias = torch.randn(72, generator=generator)
    got = kernels.linear(x, kernels.pack_projection(weight, bias))
    wanted = reference_fp8.round_rows(x) @ reference_fp8.round_blocks(weight).T + bias
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(kernels.linear(x, kernels.pack_weight(weight)), exact.linear(x, exact.pack_weight(weight)))

    gate_up, down = torch.randn(3, 64, 200, generator=generator), torch.randn(3, 200, 32, generator=generator)
    weights, experts = torch.rand(6, 1, generator=generator), torch.randint(0, 3, (6, 1), generator=generator)
    got = kernels.experts_mlp(x, weights, experts, kernels.pack_experts(gate_up, down))
    for row in range(6):
        expert = int(experts[row, 0])
        rounded = reference_fp8.round_rows(x[row : row + 1])[0]
        gate, up = (reference_fp8.round_blocks(gate_up[expert]) @ rounded).chunk(2)
        inner = reference_fp8.round_rows((torch.nn.functional.silu(gate) * up)[None])[0]
        wanted = weights[row, 0] * (reference_fp8.round_blocks(down[expert]) @ inner)
        torch.testing.assert_close(got[row], wanted, atol=2e-2, rtol=2e-2)
