"""Batch-invariant operations in Triton: a row's bits depend on no other row, and not on how many there are.

What TritonKernels computes row by row stays; products, attention and experts are replaced. A product adds 16 columns of
K after 16 others, in order and in one accumulator, with one kind of matrix instruction whatever the tile; attention
walks the keys of a row from the first to the last. Shape legend as in kernels.api.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import triton_attention, triton_mla, triton_moe
from kernels.api import AttentionBatch
from kernels.reference import PackedWeight
from kernels.reference_fp8 import round_rows
from kernels.reference_mla import UpProjection
from kernels.triton_dense import TritonKernels
from kernels.triton_moe import Tiling

TILINGS = (
    Tiling(128, 256, 64, 8, 3),
    Tiling(128, 128, 64, 8, 3),
    Tiling(64, 128, 64, 4, 4),
    Tiling(64, 64, 128, 4, 3),
    Tiling(64, 32, 128, 4, 4),
)
"""Largest first. All give the same bits: with four warps to each 64 rows, Hopper's wgmma computes every one."""
FLOAT32_TILING = Tiling(32, 64, 32, 4, 2)
MIN_ROWS = 64
ENOUGH_PROGRAMS = 96
"""With so many a larger tile, which reads less, is faster than more programs, of which an H200 runs 132 at once."""
EXPERT_TILINGS = (Tiling(64, 128, 64, 4, 4), Tiling(128, 128, 64, 8, 3))
"""For at most MIN_ROWS pairs of an expert, on average, and for more; the same bits."""
ROUTER_ROWS = 32


class InvariantTritonKernels(TritonKernels):
    """The operations of TritonKernels of which a row's result could depend on the batch."""

    name = "triton-invariant"

    @property
    def prefix_sharing(self) -> frozenset[str]:
        """See Kernels.prefix_sharing; what is shared would be summed apart."""
        return frozenset()

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """See Kernels.linear."""
        return self._multiply(x, packed, x.dtype)

    def wide_linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """See Kernels.wide_linear."""
        return self._multiply(x, packed, torch.float32)

    @staticmethod
    def _multiply(x: Tensor, packed: PackedWeight, dtype: torch.dtype) -> Tensor:
        x = round_rows(x) if packed.is_fp8 else x
        out = torch.empty(1, len(x), len(packed.weight), dtype=dtype, device=x.device)
        multiply(x[None], packed.weight[None], out, packed.bias)
        return out[0]

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """See Kernels.attention."""
        return triton_attention.attend_alike(q.contiguous(), cache, batch, scale, window or 0)

    def latent_attention(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: UpProjection, *, scale: float
    ) -> Tensor:
        """See Kernels.latent_attention; every row absorbs, since the other form rounds differently."""
        (num_heads, _, rank), value_size = up.keys.shape, up.values.shape[1]
        absorbed = q.new_empty(num_heads, len(q), rank)
        multiply(q.transpose(0, 1), up.keys.transpose(1, 2), absorbed)
        attended = triton_mla.attend_alike(absorbed, q_rope, cache, batch, scale)
        out = q.new_empty(len(q), num_heads, value_size)
        multiply(attended, up.values, out.transpose(0, 1))
        return out

    def router_logits(self, x: Tensor, packed: Tensor) -> Tensor:
        """See Kernels.router_logits."""
        if packed.dtype == torch.bfloat16:
            return triton_moe.router_logits(x, packed, alike_rows=ROUTER_ROWS)
        return self.linear(x.float(), PackedWeight(packed, None, False))

    def choose_tiling(self, num_pairs: int, num_experts: int) -> Tiling:
        """See TritonKernels.choose_tiling."""
        if self.dtype == torch.float32:
            return super().choose_tiling(num_pairs, num_experts)  # one for any number
        return EXPERT_TILINGS[num_pairs > MIN_ROWS * num_experts]


def choose_tiling(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tiling:
    """The largest tiling that still gives the device enough programs."""
    if dtype == torch.float32:
        return FLOAT32_TILING
    for tiling in TILINGS:
        num_programs = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns)
        if num_programs >= ENOUGH_PROGRAMS and (tiling.rows == MIN_ROWS or num_rows > MIN_ROWS):
            return tiling
    return TILINGS[-1]


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, tiling: Tiling | None = None) -> None:
    """Batched ``x`` [A, N, K] times ``weight`` [A, C, K], transposed, plus ``bias`` [C], into ``out`` [A, N, C].

    Any strides but for neighbouring K of ``x`` and C of ``out``; sums in fp32.
    """
    num_batches, num_rows, depth = x.shape
    num_columns = weight.shape[1]
    if not out.numel():
        return
    if x.stride(2) != 1:
        x = x.contiguous()
    tiling = tiling or choose_tiling(num_rows, num_columns, x.dtype)
    batch_strides = [side.stride(0) if num_batches > 1 else 0 for side in (x, weight, out)]  # else compiled anew for N
    num_tiles = triton.cdiv(num_rows, tiling.rows)
    _multiply[(num_tiles * triton.cdiv(num_columns, tiling.columns), num_batches)](
        x, weight, out if bias is None else bias, out, num_rows, num_columns, depth, num_tiles,
        *batch_strides, x.stride(1), weight.stride(1), weight.stride(2), out.stride(1),
        IS_WHOLE_WIDTH=num_columns % tiling.columns == 0, IS_WHOLE_DEPTH=depth % tiling.depth == 0,
        HAS_BIAS=bias is not None, TILE_ROWS=tiling.rows, TILE_COLUMNS=tiling.columns, TILE_DEPTH=tiling.depth,
        TILES_OF_A_GROUP=8,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _multiply(
    x, weight, bias, out, num_rows, num_columns, depth, num_tiles,
    x_batch, weight_batch, out_batch, x_row, weight_column, weight_depth, out_row,
    IS_WHOLE_WIDTH: tl.constexpr, IS_WHOLE_DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_DEPTH: tl.constexpr, TILES_OF_A_GROUP: tl.constexpr,
):  # fmt: skip
    """One tile; tiles of rows come in groups that walk all columns, so that both operands are read while in cache."""
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    in_group = TILES_OF_A_GROUP * tl.cdiv(num_columns, TILE_COLUMNS)
    first_tile = program // in_group * TILES_OF_A_GROUP
    group_tiles = tl.minimum(num_tiles - first_tile, TILES_OF_A_GROUP)
    rows = (first_tile + program % in_group % group_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = program % in_group // group_tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    depths = tl.arange(0, TILE_DEPTH)
    is_row, is_column = rows < num_rows, columns < num_columns
    x_rows = tl.where(is_row, rows, 0).to(tl.int64)  # what lies outside is computed and not stored
    weight_columns = columns.to(tl.int64)
    if not IS_WHOLE_WIDTH:
        weight_columns = tl.where(is_column, columns, 0).to(tl.int64)
    x_at = x + batch * x_batch + x_rows[:, None] * x_row + depths[None, :]
    weight_at = weight + batch * weight_batch + weight_columns[None, :] * weight_column + depths[:, None] * weight_depth
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, depth, TILE_DEPTH):
        if IS_WHOLE_DEPTH:
            total = tl.dot(tl.load(x_at), tl.load(weight_at), total, input_precision="ieee")
        else:
            is_left = start + depths < depth
            values = tl.load(x_at, mask=is_left[None, :], other=0.0)
            weights = tl.load(weight_at, mask=is_left[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        x_at += TILE_DEPTH
        weight_at += TILE_DEPTH * weight_depth
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = out + batch * out_batch + rows[:, None].to(tl.int64) * out_row + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
