"""DeepSeek's own kernels for NVIDIA Hopper: FlashMLA for decode attention, DeepGEMM for grouped and fp8 products.

Each library is optional and imported when this backend is opened; what it does not take is left to Triton. Formats and
limits are those of the versions that pyproject.toml names. Knows no models.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import triton_fp8, triton_mla, triton_moe
from kernels.api import BLOCK_SIZE, AttentionBatch, Choice
from kernels.compiled import compiled_directory
from kernels.reference_fp8 import BLOCK, quantize_blocks
from kernels.reference_mla import UpProjection
from kernels.reference_moe import PackedExperts
from kernels.triton_dense import TritonKernels

PAGE_SIZE, LATENT_SIZE, QUERY_SIZE = 64, 512, 576  # what FlashMLA's dense decode is built for
CONTIGUOUS_ALIGNMENT = 128  # rows of an expert in DeepGEMM's contiguous layout
MASKED_ALIGNMENT = 128  # no tile of one expert reaches into the next one's rows
MASKED_SHARE, MASKED_ROWS = 96, 512
"""Pairs an expert, on average, and rows up to which the masked layout is used: it computes fewer rows of padding.

Its memory is that of all rows for each expert: 3 GB for 512 rows of DeepSeek-V3.
"""
CONTIGUOUS_SHARE, CONTIGUOUS_SIZE = 256, 2048
"""From so many pairs an expert on, of experts so large in both sizes, DeepGEMM is used in bfloat16 too.

Its products are faster then by more than gathering and gating cost, which Triton does on the way. On an H200, 64
experts of 2,048 x 1,408: 256 rows 0.320 ms (masked), Triton 0.293; 8,192 rows 1.72 ms (contiguous), Triton 1.67.
"""
MIN_HEADS = 64
"""Heads that fill a tile of FlashMLA; with 16, 256 decodes of about 800 keys take it 0.113 ms, and Triton 0.086."""


FP8_DEPTH = BLOCK
"""Inputs of a projection come in multiples of this for DeepGEMM's fp8 products."""


@dataclass(frozen=True)
class Fp8Weight:
    """Codes [..., out, in] and their blocks' scales; a bias [out]."""

    codes: Tensor
    scales: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Fp8Experts:
    """Stacked weights of E gated MLPs."""

    gate_up: Fp8Weight
    down: Fp8Weight


@dataclass(frozen=True)
class Libraries:
    """The modules that could be imported."""

    flash_mla: Any
    deep_gemm: Any


class HopperKernels(TritonKernels):
    """Triton's operations, with those replaced that a library does faster; bfloat16 on compute capability 9.0."""

    name = "hopper"
    min_heads = MIN_HEADS

    def __init__(self, device: torch.device, dtype: torch.dtype, libraries: Libraries, *, is_fp8: bool = False) -> None:
        super().__init__(device, dtype, is_fp8=is_fp8)
        self.libraries = libraries
        self._schedule: tuple[AttentionBatch, bool, Schedule] | None = None  # of the last step, for all layers

    def latent_block_size(self, num_heads: int) -> int:
        """See Kernels.latent_block_size."""
        return PAGE_SIZE if self.libraries.flash_mla is not None and num_heads >= self.min_heads else BLOCK_SIZE

    def attend_absorbed(
        self,
        q: Tensor,
        q_rope: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        up: UpProjection,
        *,
        scale: float,
        out: Tensor,
    ) -> None:
        """See TritonKernels.attend_absorbed."""
        num_rows, num_heads, _ = q.shape
        rank, size = up.keys.shape[2], cache.shape[3]
        fits = (cache.shape[1], rank, size) == (PAGE_SIZE, LATENT_SIZE, QUERY_SIZE) and num_heads >= self.min_heads
        if self.libraries.flash_mla is None or not fits:
            super().attend_absorbed(q, q_rope, cache, batch, up, scale=scale, out=out)
            return
        query = q.new_empty(num_rows, 1, num_heads, size)
        torch.bmm(q.transpose(0, 1), up.keys, out=query[:, 0, :, :rank].transpose(0, 1))
        query[:, 0, :, rank:] = q_rope
        schedule = self._schedule_for(batch, num_rows)
        attended, _ = self.libraries.flash_mla.flash_mla_with_kvcache(
            query, cache, schedule.block_table, schedule.seq_lens, rank, schedule.metadata, softmax_scale=scale
        )
        triton_mla.project_values(attended[:, 0].transpose(0, 1), up, out)

    def pack_projection(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """See Kernels.pack_projection."""
        if not self._has_fp8(weight.shape[1]):
            return super().pack_projection(weight, bias)
        return Fp8Weight(*quantize_blocks(weight), bias)

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """See Kernels.linear."""
        if not isinstance(packed, Fp8Weight):
            return super().linear(x, packed)
        out = x.new_empty(len(x), len(packed.codes))
        if len(x):
            self.libraries.deep_gemm.fp8_gemm_nt(triton_fp8.quantize_rows(x), (packed.codes, packed.scales), out)
        return out if packed.bias is None else out.add_(packed.bias)

    def pack_experts(self, gate_up: Tensor, down: Tensor, limit: float | None = None) -> Any:
        """See Kernels.pack_experts."""
        if limit is not None or not (self._has_fp8(gate_up.shape[2]) and self._has_fp8(down.shape[2])):
            return super().pack_experts(gate_up, down, limit)
        packed = []
        for weight in (gate_up, down):  # expert by expert: in fp32 all of them may not fit
            codes, scales = zip(*(quantize_blocks(expert) for expert in weight), strict=True)
            packed.append(Fp8Weight(torch.stack(codes), torch.stack(scales)))
        return Fp8Experts(*packed)

    def experts_mlp(self, x: Tensor, weights: Tensor, experts: Tensor, packed: Any) -> Tensor:
        """See Kernels.experts_mlp."""
        if isinstance(packed, Fp8Experts):
            is_small = len(x) <= MASKED_ROWS and experts.numel() <= MASKED_SHARE * len(packed.down.codes)
            compute = self.experts_mlp_masked if is_small else self.experts_mlp_contiguous
        elif self._takes_experts(packed) and experts.numel() >= CONTIGUOUS_SHARE * len(packed.down):
            compute = self.experts_mlp_contiguous
        else:
            compute = super().experts_mlp
        return compute(x, weights, experts, packed)

    def _has_fp8(self, depth: int) -> bool:
        return self.is_fp8 and self.libraries.deep_gemm is not None and depth % FP8_DEPTH == 0

    def _takes_experts(self, packed: PackedExperts) -> bool:
        depths = packed.gate_up.shape[2], packed.down.shape[2]
        is_taken = self.libraries.deep_gemm is not None and not packed.is_fp8 and packed.limit is None
        return is_taken and all(depth % 64 == 0 and depth >= CONTIGUOUS_SIZE for depth in depths)

    def experts_mlp_contiguous(self, x: Tensor, weights: Tensor, experts: Tensor, packed: Any) -> Tensor:
        """Runs of experts follow each other: for steps of many rows."""
        deep_gemm, is_fp8 = self.libraries.deep_gemm, isinstance(packed, Fp8Experts)
        num_experts = len(packed.down.codes) if is_fp8 else len(packed.down)
        rows = triton_moe.sort_by_expert(experts, num_experts, CONTIGUOUS_ALIGNMENT)
        y = x.new_empty(len(rows.sources), x.shape[1])
        if is_fp8:
            multiply = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
            gate_up = x.new_empty(len(rows.sources), packed.gate_up.codes.shape[1])
            gathered = triton_fp8.quantize_rows(x, sources=rows.sources, experts=rows.experts)
            multiply(gathered, (packed.gate_up.codes, packed.gate_up.scales), gate_up, rows.experts)
            inner = triton_fp8.quantize_rows(gate_up, is_gated=True, experts=rows.experts)
            multiply(inner, (packed.down.codes, packed.down.scales), y, rows.experts)
        else:
            multiply = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
            gate_up = x.new_empty(len(rows.sources), packed.gate_up.shape[1])
            multiply(x.index_select(0, rows.sources), packed.gate_up, gate_up, rows.experts)
            multiply(self.silu_mul(gate_up), packed.down, y, rows.experts)
        return triton_moe.combine(y, weights, rows)

    def experts_mlp_masked(self, x: Tensor, weights: Tensor, experts: Tensor, packed: Any) -> Tensor:
        """Each expert has room for all rows, of which it computes its own: for steps of few rows, recorded ones."""
        deep_gemm, is_fp8 = self.libraries.deep_gemm, isinstance(packed, Fp8Experts)
        num_experts = len(packed.down.codes) if is_fp8 else len(packed.down)
        room = -(-len(x) // MASKED_ALIGNMENT) * MASKED_ALIGNMENT
        expected = -(-experts.numel() // num_experts)
        rows, counts = triton_moe.place_by_expert(experts, num_experts, room)
        shape = num_experts, room, -1
        y = x.new_empty(num_experts, room, x.shape[1])
        if is_fp8:
            multiply = deep_gemm.m_grouped_fp8_gemm_nt_masked
            gate_up = x.new_empty(num_experts, room, packed.gate_up.codes.shape[1])
            quantize = partial(triton_fp8.quantize_rows, experts=rows.experts[:-1], num_runs=num_experts)
            scattered = quantize(x, sources=rows.sources[:-1])
            multiply(scattered, (packed.gate_up.codes, packed.gate_up.scales), gate_up, counts, expected)
            inner = quantize(gate_up.flatten(0, 1), is_gated=True)
            multiply(inner, (packed.down.codes, packed.down.scales), y, counts, expected)
        else:
            multiply = deep_gemm.m_grouped_bf16_gemm_nt_masked
            gate_up = x.new_empty(num_experts, room, packed.gate_up.shape[1])
            multiply(triton_moe.scatter_rows(x, rows).view(shape), packed.gate_up, gate_up, counts, expected)
            gated = triton_moe.silu_mul_rows(gate_up.flatten(0, 1), rows).view(shape)
            multiply(gated, packed.down, y, counts, expected)
        return triton_moe.combine(y.flatten(0, 1), weights, rows)

    def _schedule_for(self, batch: AttentionBatch, num_rows: int) -> Schedule:
        """Made by the first layer of a step; while a graph is recorded, inside it, so that replays make it anew."""
        is_recording = torch.cuda.is_current_stream_capturing()
        if self._schedule is None or self._schedule[0] is not batch or self._schedule[1] != is_recording:
            metadata, _ = self.libraries.flash_mla.get_mla_metadata()
            table, seq_lens = batch.block_table.int(), batch.seq_lens.int()
            if num_rows == batch.num_decodes:
                table, seq_lens = table[:num_rows], seq_lens[:num_rows]
            else:  # each row is a sequence of its own, with the keys up to its position
                rows = torch.arange(num_rows, device=table.device)
                sequences = torch.searchsorted(batch.query_starts[1:], rows, right=True)
                table = table.index_select(0, sequences.clamp_(max=len(table) - 1))
                seq_lens = batch.positions.int() + 1
            self._schedule = batch, is_recording, Schedule(table, seq_lens, metadata)
        return self._schedule[2]


@dataclass(frozen=True)
class Schedule:
    """FlashMLA's view of a step."""

    block_table: Tensor  # int32 [N, M]
    seq_lens: Tensor  # int32 [N]
    metadata: Any  # filled by the step's first call, for the others


def load_libraries() -> tuple[Libraries, tuple[Choice, ...]]:
    """Import what is there, and say of each library what became of it."""
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(compiled_directory() / "deep_gemm"))  # read at import
    found: dict[str, Any] = {}
    choices = []
    for name, operation in (
        ("flash_mla", f"latent attention of {MIN_HEADS} heads or more"),
        ("deep_gemm", f"fp8 products, experts of {CONTIGUOUS_SIZE} x {CONTIGUOUS_SIZE} or more"),
    ):
        try:
            found[name] = importlib.import_module(name)
        except (ImportError, OSError, AssertionError, RuntimeError) as error:
            found[name] = None
            choices.append(Choice(operation, "triton", f"{name} cannot be imported: {error}"))
        else:
            choices.append(Choice(operation, name, f"version {getattr(found[name], '__version__', 'unknown')}"))
    return Libraries(**found), tuple(choices)
