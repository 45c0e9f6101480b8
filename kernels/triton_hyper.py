"""Mixing the residual streams of hyper-connections in Triton: all iterations of a row's small matrix in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of one program


def sinkhorn(logits: Tensor, num_iterations: int, eps: float) -> Tensor:
    """See Kernels.sinkhorn, for a number of streams that is a power of two."""
    num_rows, size, _ = logits.shape
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if num_rows:
        _sinkhorn[(triton.cdiv(num_rows, ROWS),)](
            logits.contiguous(), out, num_rows, num_iterations, eps, SIZE=size, ROWS=ROWS
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_iterations"])
def _sinkhorn(logits, out, num_rows, num_iterations, eps, SIZE: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    at = rows * (SIZE * SIZE) + tl.arange(0, SIZE)[None, :, None] * SIZE + tl.arange(0, SIZE)[None, None, :]
    inside = (rows < num_rows) & (at >= 0)
    values = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
    powers = tl.exp(values - tl.max(values, 2)[:, :, None])
    matrix = powers / tl.sum(powers, 2)[:, :, None] + eps
    matrix = matrix / (tl.sum(matrix, 1)[:, None, :] + eps)
    for _ in range(num_iterations - 1):
        matrix = matrix / (tl.sum(matrix, 2)[:, :, None] + eps)
        matrix = matrix / (tl.sum(matrix, 1)[:, None, :] + eps)
    tl.store(out + at, matrix, mask=inside)
