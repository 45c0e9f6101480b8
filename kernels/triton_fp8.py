"""Rows to fp8 in Triton, in the scale layout that DeepGEMM reads on Hopper; reference_fp8 is the oracle.

Gathering rows and silu(gate) * up are done on the way. Knows no products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_fp8 import BLOCK, CODES, LARGEST, SMALLEST_SCALE

TILE_ROWS = 16
SCALE_ALIGNMENT = 4  # rows: 16 bytes, of the bulk copy engine


def quantize_rows(
    x: Tensor,
    *,
    is_gated: bool = False,
    sources: Tensor | None = None,
    experts: Tensor | None = None,
    num_runs: int = 1,
) -> tuple[Tensor, Tensor]:
    """Codes [X, K] and scales float32 [X, K / 128]; with ``num_runs`` R > 1 both with [R, X / R] for X.

    ``x`` is [N, K], or [N, 2K] if ``is_gated``: silu(first half) * second half. Row i is x[sources[i]], or x[i].
    Undefined where experts[i] is negative. Scales are column-major within a run.
    """
    num_rows = len(x) if sources is None else len(sources)
    width = x.shape[1] // 2 if is_gated else x.shape[1]
    num_groups, run = width // BLOCK, triton.cdiv(num_rows // num_runs, SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    codes = torch.empty(num_rows, width, dtype=CODES, device=x.device)
    scales = torch.empty(num_runs, num_groups, run, dtype=torch.float32, device=x.device)
    if num_rows:
        _quantize_rows[(triton.cdiv(num_rows, TILE_ROWS), num_groups)](
            x, codes, scales, codes if sources is None else sources, codes if experts is None else experts,
            num_rows, x.stride(0), width, num_rows // num_runs, run, IS_GATED=is_gated, HAS_SOURCES=sources is not None,
            HAS_EXPERTS=experts is not None, LARGEST=LARGEST, SMALLEST=SMALLEST_SCALE, TILE_ROWS=TILE_ROWS, BLOCK=BLOCK,
        )  # fmt: skip
    by_row = scales.transpose(1, 2)[:, : num_rows // num_runs]
    if num_runs == 1:
        return codes, by_row[0]
    return codes.unflatten(0, (num_runs, -1)), by_row


@triton.jit(do_not_specialize=["num_rows", "run_rows", "run"])
def _quantize_rows(
    x, codes, scales, sources, experts, num_rows, row_stride, width, run_rows, run,
    IS_GATED: tl.constexpr, HAS_SOURCES: tl.constexpr, HAS_EXPERTS: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    group = tl.program_id(1)
    columns = group * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    if HAS_EXPERTS:
        inside = inside & (tl.load(experts + rows, mask=inside, other=-1) >= 0)
    source = rows
    if HAS_SOURCES:
        source = tl.load(sources + rows, mask=inside, other=0)
    at = x + source[:, None] * row_stride + columns[None, :]
    values = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    if IS_GATED:
        ups = tl.load(at + width, mask=inside[:, None], other=0.0).to(tl.float32)
        values = (values * tl.sigmoid(values) * ups).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 1) / LARGEST, SMALLEST)
    tl.store(
        codes + rows[:, None] * width + columns[None, :],
        (values / scale[:, None]).to(codes.dtype.element_ty),
        mask=inside[:, None],
    )
    scale_at = rows // run_rows * run * (width // BLOCK) + group * run + rows % run_rows
    tl.store(scales + scale_at, scale, mask=inside)
