"""Block-scaled fp8 (DeepSeek-V3, arXiv:2412.19437, 3.3) in plain torch: what codes and scales of a tensor are.

Weights have one scale for 128 x 128 values, activations one for 128 values of a row; all sums are in fp32 or wider than
the codes. Knows no layers.
"""

import torch
from torch import Tensor
from torch.nn import functional

CODES = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
SMALLEST_SCALE = 1e-10  # of a block of zeros


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [N, K] -> codes [N, K], scales float32 [N, ceil(K / 128)]."""
    blocks = _pad(x.float()).unflatten(-1, (-1, BLOCK))
    scales = _scales(blocks.abs().amax(-1))
    codes = (blocks / scales[..., None]).to(CODES).flatten(-2)
    return codes[..., : x.shape[-1]].contiguous(), scales


def quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` [..., out, in] -> codes of that shape, scales float32 [..., ceil(out / 128), ceil(in / 128)].

    A block that is exact at a scale that is a power of two, as one of a checkpoint with such scales, keeps it.
    """
    rows, columns = weight.shape[-2:]
    blocks = _pad(_pad(weight.float()).mT).mT.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK)).transpose(-2, -3)
    scales = _scales(blocks.abs().amax((-1, -2)))
    powers = torch.exp2(torch.ceil(torch.log2(scales)))
    rounded = (blocks / powers[..., None, None]).to(CODES).float() * powers[..., None, None]
    scales = torch.where((rounded == blocks).all(-1).all(-1), powers, scales)
    codes = (blocks / scales[..., None, None]).to(CODES)
    codes = codes.transpose(-2, -3).flatten(-4, -3).flatten(-2)
    return codes[..., :rows, :columns].contiguous(), scales


def round_rows(x: Tensor) -> Tensor:
    """``x`` [N, K] as its codes stand for it, in its dtype."""
    codes, scales = quantize_rows(x)
    return (codes.float() * scales.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]).to(x.dtype)


def round_blocks(weight: Tensor) -> Tensor:
    """``weight`` [..., out, in] as its codes stand for it, in its dtype."""
    rows, columns = weight.shape[-2:]
    codes, scales = quantize_blocks(weight)
    spread = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :rows, :columns]
    return (codes.float() * spread).to(weight.dtype)


def _pad(x: Tensor) -> Tensor:
    return functional.pad(x, (0, -x.shape[-1] % BLOCK))


def _scales(largest: Tensor) -> Tensor:
    return (largest / LARGEST).clamp(min=SMALLEST_SCALE)
