"""DeepSeek's own kernels for NVIDIA Hopper: FlashMLA for decode attention, DeepGEMM for grouped and fp8 products.

Each library is optional and imported when this backend is opened; what it does not take is left to Triton. Formats and
limits are those of the versions that pyproject.toml names. Knows no models.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import triton_mla, triton_moe
from kernels.api import AttentionBatch, Choice
from kernels.reference_mla import UpProjection
from kernels.reference_moe import PackedExperts
from kernels.triton_dense import TritonKernels

PAGE_SIZE, LATENT_SIZE, QUERY_SIZE = 64, 512, 576  # what FlashMLA's dense decode is built for
CONTIGUOUS_ALIGNMENT = 128  # rows of an expert in DeepGEMM's contiguous layout
MASKED_ALIGNMENT = 128  # no tile of one expert reaches into the next one's rows
MASKED_SHARE = 96
"""Pairs an expert, on average, up to which the masked layout is used: it computes fewer rows of padding."""
ROW_HEADS = 64
"""Heads with which every row fills a tile of FlashMLA alone, so that rows of a run gain nothing from sharing one."""


@dataclass(frozen=True)
class Libraries:
    """The modules that could be imported."""

    flash_mla: Any
    deep_gemm: Any


class HopperKernels(TritonKernels):
    """Triton's operations, with those replaced that a library does faster; bfloat16 on compute capability 9.0."""

    name = "hopper"

    def __init__(self, device: torch.device, dtype: torch.dtype, libraries: Libraries) -> None:
        super().__init__(device, dtype)
        self._libraries = libraries
        self._schedule: tuple[AttentionBatch, bool, Schedule] | None = None  # of the last step, for all layers

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
        is_decode = num_rows == batch.num_decodes
        fits = (cache.shape[1], rank, size) == (PAGE_SIZE, LATENT_SIZE, QUERY_SIZE)
        if self._libraries.flash_mla is None or not fits or not (is_decode or num_heads >= ROW_HEADS):
            super().attend_absorbed(q, q_rope, cache, batch, up, scale=scale, out=out)
            return
        query = q.new_empty(num_rows, 1, num_heads, size)
        torch.bmm(q.transpose(0, 1), up.keys, out=query[:, 0, :, :rank].transpose(0, 1))
        query[:, 0, :, rank:] = q_rope
        schedule = self._schedule_for(batch, num_rows)
        attended, _ = self._libraries.flash_mla.flash_mla_with_kvcache(
            query, cache, schedule.block_table, schedule.seq_lens, rank, schedule.metadata, softmax_scale=scale
        )
        triton_mla.project_values(attended[:, 0].transpose(0, 1), up, out)

    def experts_mlp(self, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
        """See Kernels.experts_mlp."""
        deep_gemm = self._libraries.deep_gemm
        num_experts, hidden, inner = packed.down.shape
        if deep_gemm is None or hidden % 64 or inner % 64:
            return super().experts_mlp(x, weights, experts, packed)
        if experts.numel() > MASKED_SHARE * num_experts:
            return self._experts_mlp_contiguous(x, weights, experts, packed)
        return self._experts_mlp_masked(x, weights, experts, packed)

    def _experts_mlp_contiguous(self, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
        """Runs of experts follow each other: for steps of many rows."""
        multiply = self._libraries.deep_gemm.m_grouped_bf16_gemm_nt_contiguous
        rows = triton_moe.sort_by_expert(experts, len(packed.down), CONTIGUOUS_ALIGNMENT)
        gate_up = x.new_empty(len(rows.sources), packed.gate_up.shape[1])
        multiply(x.index_select(0, rows.sources), packed.gate_up, gate_up, rows.experts)
        y = x.new_empty(len(rows.sources), x.shape[1])
        multiply(self.silu_mul(gate_up), packed.down, y, rows.experts)
        return triton_moe.combine(y, weights, rows)

    def _experts_mlp_masked(self, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
        """Each expert has room for all rows, of which it computes its own: for steps of few rows, recorded ones."""
        multiply = self._libraries.deep_gemm.m_grouped_bf16_gemm_nt_masked
        num_experts, hidden, inner = packed.down.shape
        room = -(-len(x) // MASKED_ALIGNMENT) * MASKED_ALIGNMENT
        expected = -(-experts.numel() // num_experts)
        rows, counts = triton_moe.place_by_expert(experts, num_experts, room)
        gate_up = x.new_empty(num_experts, room, 2 * inner)
        multiply(
            triton_moe.scatter_rows(x, rows).view(num_experts, room, hidden), packed.gate_up, gate_up, counts, expected
        )
        y = x.new_empty(num_experts, room, hidden)
        inner_rows = triton_moe.silu_mul_rows(gate_up.flatten(0, 1), rows)
        multiply(inner_rows.view(num_experts, room, inner), packed.down, y, counts, expected)
        return triton_moe.combine(y.flatten(0, 1), weights, rows)

    def _schedule_for(self, batch: AttentionBatch, num_rows: int) -> Schedule:
        """Made by the first layer of a step; while a graph is recorded, inside it, so that replays make it anew."""
        is_recording = torch.cuda.is_current_stream_capturing()
        if self._schedule is None or self._schedule[0] is not batch or self._schedule[1] != is_recording:
            metadata, _ = self._libraries.flash_mla.get_mla_metadata()
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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightmill" / "deep_gemm"
    os.environ.setdefault("DG_JIT_CACHE_DIR", str(cache))  # read at import; kernels compiled once serve later starts
    found: dict[str, Any] = {}
    choices = []
    for name, operation in (("flash_mla", "decode of latent attention"), ("deep_gemm", "experts")):
        try:
            found[name] = importlib.import_module(name)
        except (ImportError, OSError, AssertionError, RuntimeError) as error:
            found[name] = None
            choices.append(Choice(operation, "triton", f"{name} cannot be imported: {error}"))
        else:
            choices.append(Choice(operation, name, f"version {getattr(found[name], '__version__', 'unknown')}"))
    return Libraries(**found), tuple(choices)
