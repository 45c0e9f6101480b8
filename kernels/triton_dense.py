"""Fused Triton kernels for the dense family on NVIDIA GPUs: norms, rotary, SwiGLU, cache writes.

The reference is the oracle of each. Everything launched here is safe inside a CUDA graph: grids depend on shapes only,
lengths are read on the device. Knows no schedules.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import triton_attention, triton_hyper, triton_mla, triton_moe, triton_sampling
from kernels.api import AttentionBatch, Gate, HeadNorms, SamplingBatch, Scoring
from kernels.reference import PackedWeight, ReferenceKernels
from kernels.reference_fp8 import round_rows
from kernels.reference_mla import UpProjection
from kernels.reference_moe import PackedExperts


class TritonKernels(ReferenceKernels):
    """The reference's operations, with the hot ones fused; float16, bfloat16 or float32 on CUDA."""

    name = "triton"

    def __init__(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float32, *, is_fp8: bool = False
    ) -> None:
        super().__init__(device, dtype, is_fp8=is_fp8)
        self._can_widen = _can_widen(device, dtype)
        self._expansion: tuple[AttentionBatch, triton_mla.Expansion | None] | None = None

    @property
    def unrecordable(self) -> frozenset[str]:
        """See Kernels.unrecordable."""
        return frozenset()

    @property
    def prefix_sharing(self) -> frozenset[str]:
        """See Kernels.prefix_sharing."""
        return frozenset({"attention"})

    @property
    def decode_only(self) -> frozenset[str]:
        """See Kernels.decode_only."""
        return frozenset()

    def wide_linear(self, x: Tensor, packed: Any) -> Tensor:
        """See Kernels.wide_linear."""
        if self._can_widen and isinstance(packed, PackedWeight) and packed.bias is None and not packed.is_fp8:
            return torch.mm(x, packed.weight.t(), out_dtype=torch.float32)
        return super().wide_linear(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm; x [N, width] or [N, heads, width] may be a view with a contiguous last dimension."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
        rows = x.shape[0] * heads
        if rows:
            head_stride = x.stride(1) if x.dim() == 3 else 0
            _rms_norm[(rows,)](
                x, weight, out, x.stride(0), head_stride, heads, width, eps, BLOCK=triton.next_power_of_2(width)
            )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm; overwrites both inputs."""
        rows, width = x.shape
        if rows:
            _add_rms_norm[(rows,)](x, residual, weight, width, eps, BLOCK=triton.next_power_of_2(width))
        return x, residual

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.rotary."""
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        return _launch_rotary(q, k, (cos, sin), norms, k_out), k_out

    def rotary_write_kv(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor], *, cache: Tensor, slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """See Kernels.rotary_write_kv."""
        return _launch_rotary(q, k, cos_sin, norms, cache, (slots, v))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels.silu_mul."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        if rows:
            _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024)
        return out

    def write_kv(self, cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See Kernels.write_kv."""
        rows, heads, size = k.shape
        if rows:
            width = heads * size
            _write_kv[(rows,)](
                cache, slots, k, v, k.stride(0), k.stride(1), v.stride(0), v.stride(1), cache.stride(0),
                size, width, BLOCK=triton.next_power_of_2(width),
            )  # fmt: skip

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """See Kernels.attention."""
        return triton_attention.attend(q.contiguous(), cache, batch, scale, window or 0)

    def write_latent(self, cache: Tensor, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """See Kernels.write_latent."""
        triton_mla.write_latent(cache, slots, latent, k_rope)

    def latent_attention(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: UpProjection, *, scale: float
    ) -> Tensor:
        """See Kernels.latent_attention."""
        if self._expansion is None or self._expansion[0] is not batch:  # once a step, for all layers
            self._expansion = batch, triton_mla.plan_expansion(batch, cache.shape[1], up, q_rope.shape[2])
        expansion = self._expansion[1]
        num_absorbed = batch.num_decodes if expansion else len(q)
        out = q.new_empty(len(q), *up.values.shape[:2])
        if num_absorbed:
            first = slice(num_absorbed)
            self.attend_absorbed(q[first], q_rope[first], cache, batch, up, scale=scale, out=out[first])
        if expansion:
            rest = slice(num_absorbed, None)
            triton_mla.attend_expanded(q[rest], q_rope[rest], cache, batch, expansion, up, scale, out[rest])
        return out

    def attend_absorbed(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: UpProjection, *, scale: float,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Attend to latents for the first rows of ``batch``: all, or those of its decodes; into ``out`` [N, H, Dv]."""
        absorbed = triton_mla.absorb(q, up)
        triton_mla.project_values(triton_mla.attend_absorbed(absorbed, q_rope, cache, batch, scale), up, out)

    def pack_router(self, weight: Tensor) -> Tensor:
        """See Kernels.pack_router."""
        return triton_moe.split_router(weight) if self.dtype == torch.bfloat16 else weight

    def router_logits(self, x: Tensor, packed: Tensor) -> Tensor:
        """See Kernels.router_logits."""
        if packed.dtype != torch.bfloat16:
            return super().router_logits(x, packed)
        return triton_moe.router_logits(x, packed)

    def route(self, logits: Tensor, gate: Gate, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Kernels.route."""
        if gate.scoring is Scoring.SQRT_SOFTPLUS:
            return super().route(logits, gate, bias)
        return triton_moe.route(logits, gate, bias)

    def choose_tiling(self, num_pairs: int, num_experts: int) -> triton_moe.Tiling:
        """Of the experts' products."""
        return triton_moe.choose_tiling(num_pairs, num_experts, self.dtype)

    def experts_mlp(self, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
        """See Kernels.experts_mlp."""
        num_experts = len(packed.down)
        tiling = self.choose_tiling(experts.numel(), num_experts)
        rows = triton_moe.sort_by_expert(experts, num_experts, tiling.rows)
        if packed.is_fp8:
            x = round_rows(x)
        inner = triton_moe.gated_linear(x, packed.gate_up, rows, tiling, packed.limit or 0.0)
        if packed.is_fp8:
            inner = round_rows(inner)
        return triton_moe.combine(triton_moe.grouped_linear(inner, packed.down, rows, tiling), weights, rows)

    def sinkhorn(self, logits: Tensor, num_iterations: int, eps: float) -> Tensor:
        """See Kernels.sinkhorn."""
        if logits.shape[-1].bit_count() != 1:
            return super().sinkhorn(logits, num_iterations, eps)
        return triton_hyper.sinkhorn(logits, num_iterations, eps)

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """See Kernels.apply_token_bitmask."""
        triton_sampling.apply_token_bitmask(logits, bitmask, rows)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """See Kernels.sample."""
        return triton_sampling.sample(logits, batch)


def _can_widen(device: torch.device | None, dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of that dtype into one of float32: it does on CUDA, in recent versions."""
    if device is None or device.type != "cuda" or dtype == torch.float32:
        return False
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    try:
        torch.mm(x, x, out_dtype=torch.float32)
    except (RuntimeError, TypeError):
        return False
    return True


def _launch_rotary(
    q: Tensor, k: Tensor, cos_sin: tuple[Tensor, Tensor], norms: HeadNorms | None, k_out: Tensor,
    cached: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Rotated q; rotated k goes to ``k_out``, which with ``cached`` (slots, v) is a cache that takes v as well."""
    rows, heads, size = q.shape
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if rows:
        q_weight, k_weight, eps = norms or (*cos_sin, 0.0)
        slots, v = cached or (k, k)
        _rotary[(rows,)](
            q, k, q_out, k_out, *cos_sin, q_weight, k_weight, eps, slots, v,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_out.stride(0),
            heads, k.shape[1], HALF=size // 2, HEADS=triton.next_power_of_2(heads + k.shape[1]),
            HAS_NORMS=norms is not None, HAS_CACHE=cached is not None,
        )  # fmt: skip
    return q_out


@triton.jit
def _rms_norm(x, weight, out, row_stride, head_stride, heads, width, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < width
    at = (row // heads) * row_stride + (row % heads) * head_stride
    values = tl.load(x + at + columns, mask=inside, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty) * scale, mask=inside)


@triton.jit
def _add_rms_norm(x, residual, weight, width, eps, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    inside = columns < width
    at = row * width + columns
    summed = tl.load(x + at, mask=inside, other=0.0) + tl.load(residual + at, mask=inside, other=0.0)
    tl.store(residual + at, summed, mask=inside)
    values = summed.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(x + at, values.to(x.dtype.element_ty) * scale, mask=inside)


@triton.jit
def _rotary(
    q, k, q_out, k_out, cos, sin, q_weight, k_weight, eps, slots, v, q_row, q_head, k_row, k_head, v_row, v_head,
    value_offset, q_heads, k_heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_CACHE: tl.constexpr,
):  # fmt: skip
    """One row. With HAS_CACHE keys and values go to its slot: keys at ``k_out``, values ``value_offset`` behind."""
    row = tl.program_id(0)
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    is_query, is_head = heads < q_heads, heads < q_heads + k_heads
    cosine = tl.load(cos + row * 2 * HALF + dims).to(tl.float32)
    sine = tl.load(sin + row * 2 * HALF + dims).to(tl.float32)
    source_q = q + row * q_row + heads * q_head + dims
    source_k = k + row * k_row + (heads - q_heads) * k_head + dims
    source = tl.where(is_query, source_q, source_k)
    first = tl.load(source, mask=is_head, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=is_head, other=0.0).to(tl.float32)
    if HAS_NORMS:  # with the roundings of rms_norm
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        weight = tl.where(is_query, q_weight + dims, k_weight + dims)
        dtype = q_out.dtype.element_ty
        first = ((first * scale).to(dtype) * tl.load(weight)).to(tl.float32)
        second = ((second * scale).to(dtype) * tl.load(weight + HALF)).to(tl.float32)
    target_q = q_out + (row * q_heads + heads) * 2 * HALF + dims
    k_place = row
    if HAS_CACHE:
        k_place = tl.load(slots + row)
    target_k = k_out + (k_place * k_heads + heads - q_heads) * 2 * HALF + dims
    target = tl.where(is_query, target_q, target_k)
    tl.store(target, (first * cosine - second * sine).to(q_out.dtype.element_ty), mask=is_head)
    tl.store(target + HALF, (second * cosine + first * sine).to(q_out.dtype.element_ty), mask=is_head)
    if HAS_CACHE:
        is_value = is_head & (heads >= q_heads)
        source_v = v + row * v_row + (heads - q_heads) * v_head + dims
        tl.store(target + value_offset, tl.load(source_v, mask=is_value), mask=is_value)
        tl.store(target + value_offset + HALF, tl.load(source_v + HALF, mask=is_value), mask=is_value)


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_kv(cache, slots, k, v, k_row, k_head, v_row, v_head, value_offset, size, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < width
    slot = tl.load(slots + row)
    head, dim = at // size, at % size
    target = cache + slot * width + at
    tl.store(target, tl.load(k + row * k_row + head * k_head + dim, mask=inside), mask=inside)
    tl.store(target + value_offset, tl.load(v + row * v_row + head * v_head + dim, mask=inside), mask=inside)
