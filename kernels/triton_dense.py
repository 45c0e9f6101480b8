"""Fused Triton kernels for the dense family on NVIDIA GPUs: norms, rotary, SwiGLU, paged attention.

The reference is the oracle of each. Everything launched here is safe inside a CUDA graph: grids depend on shapes only,
lengths are read on the device. Knows no schedules.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import triton_mla, triton_moe, triton_sampling
from kernels.api import AttentionBatch, Gate, HeadNorms, SamplingBatch
from kernels.reference import ReferenceKernels
from kernels.reference_fp8 import round_rows
from kernels.reference_mla import UpProjection
from kernels.reference_moe import PackedExperts

PREFILL_TILE = 128  # query rows (token, head of the group) of one program
PREFILL_KEYS, PREFILL_WARPS, PREFILL_STAGES = 32, 4, 4
DECODE_KEYS, DECODE_WARPS, DECODE_STAGES = 64, 2, 2
DECODE_ROWS = 16  # smallest tile of the tensor cores: the heads of one group, padded
NUM_PROGRAMS = 264  # two per streaming multiprocessor of an H100 or H200: decode splits keys until it has so many
MAX_SPLITS = 16


class TritonKernels(ReferenceKernels):
    """The reference's operations, with the hot ones fused; float16, bfloat16 or float32 on CUDA."""

    name = "triton"

    def __init__(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float32, *, is_fp8: bool = False
    ) -> None:
        super().__init__(device, dtype, is_fp8=is_fp8)
        self._expansion: tuple[AttentionBatch, triton_mla.Expansion | None] | None = None

    @property
    def unrecordable(self) -> frozenset[str]:
        """See Kernels.unrecordable."""
        return frozenset()

    @property
    def decode_only(self) -> frozenset[str]:
        """See Kernels.decode_only."""
        return frozenset()

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
        rows, heads, size = q.shape
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        if rows:
            total = heads + k.shape[1]
            q_weight, k_weight, eps = norms or (cos, cos, 0.0)
            _rotary[(rows,)](
                q, k, q_out, k_out, cos, sin, q_weight, k_weight, eps,
                q.stride(0), q.stride(1), k.stride(0), k.stride(1), heads, k.shape[1],
                HALF=size // 2, HEADS=triton.next_power_of_2(total), HAS_NORMS=norms is not None,
            )  # fmt: skip
        return q_out, k_out

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
        q = q.contiguous()
        out = torch.empty_like(q)
        num_seqs, num_decodes = len(batch.query_lens), batch.num_decodes
        if num_seqs == 0:  # lengths are on the device: each kernel passes over the other's runs
            num_seqs = num_decodes = batch.seq_lens.shape[0]
            _attend_runs(q, cache, out, batch, (0, num_seqs), scale, window or 0, is_mixed=True)
        elif num_seqs > num_decodes:
            _attend_runs(q, cache, out, batch, (num_decodes, num_seqs), scale, window or 0)
        if num_decodes:
            _attend_decode(q, cache, out, batch, num_decodes, scale, window or 0)
        return out

    def write_latent(self, cache: Tensor, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """See Kernels.write_latent."""
        triton_mla.write_latent(cache, slots, latent, k_rope)

    def latent_attention(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: UpProjection, *, scale: float
    ) -> Tensor:
        """See Kernels.latent_attention."""
        if self._expansion is None or self._expansion[0] is not batch:  # once a step, for all layers
            self._expansion = batch, triton_mla.plan_expansion(batch, cache.shape[1], up)
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

    def route(self, logits: Tensor, gate: Gate, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Kernels.route."""
        return triton_moe.route(logits, gate, bias)

    def experts_mlp(self, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
        """See Kernels.experts_mlp."""
        num_experts = len(packed.down)
        tiling = triton_moe.choose_tiling(experts.numel(), num_experts, x.dtype)
        rows = triton_moe.sort_by_expert(experts, num_experts, tiling.rows)
        if packed.is_fp8:
            x = round_rows(x)
        inner = triton_moe.gated_linear(x, packed.gate_up, rows, tiling)
        if packed.is_fp8:
            inner = round_rows(inner)
        return triton_moe.combine(triton_moe.grouped_linear(inner, packed.down, rows, tiling), weights, rows)

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor) -> None:
        """See Kernels.apply_token_bitmask."""
        triton_sampling.apply_token_bitmask(logits, bitmask)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """See Kernels.sample; batches with top-k or top-p are left to the reference."""
        if batch.top_k is not None or batch.top_p is not None:
            return super().sample(logits, batch)
        return triton_sampling.sample(logits, batch)


def _attend_runs(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    batch: AttentionBatch,
    seqs: tuple[int, int],
    scale: float,
    window: int,
    *,
    is_mixed: bool = False,
) -> None:
    """Attend for the sequences first .. last - 1 in ``seqs``; ``is_mixed``: for those with more than one row."""
    _, num_heads, head_size = q.shape
    block_size, kv_heads = cache.shape[2], cache.shape[3]
    group = triton.next_power_of_2(num_heads // kv_heads)
    tile_tokens = max(1, PREFILL_TILE // group)
    first, last = seqs
    num_tiles = (q.shape[0] - first) // tile_tokens + (last - first)
    _paged_attention[(num_tiles, kv_heads, 1)](
        q, cache, out, out, out, batch.block_table, batch.seq_lens, batch.query_starts,
        scale * 1.4426950408889634, batch.block_table.stride(0), cache.stride(0), first, last,
        KV_HEADS=kv_heads, REAL_GROUP=num_heads // kv_heads, GROUP=group, HEAD=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size), BLOCK_SIZE=block_size, TILE_TOKENS=tile_tokens,
        TILE_ROWS=max(DECODE_ROWS, tile_tokens * group), TILE_KEYS=PREFILL_KEYS, WINDOW=window, SPLITS=1,
        IS_DECODE=False, SKIPPED_LEN=int(is_mixed),
        num_warps=PREFILL_WARPS if head_size >= 128 else 4, num_stages=PREFILL_STAGES,
    )  # fmt: skip


def _attend_decode(
    q: Tensor, cache: Tensor, out: Tensor, batch: AttentionBatch, num_seqs: int, scale: float, window: int
) -> None:
    """Attend for those of the first ``num_seqs`` sequences that have one row."""
    _, num_heads, head_size = q.shape
    block_size, kv_heads = cache.shape[2], cache.shape[3]
    group = triton.next_power_of_2(num_heads // kv_heads)
    splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, NUM_PROGRAMS // (num_seqs * kv_heads))))
    partial = out if splits == 1 else q.new_empty((num_seqs, num_heads, splits, head_size), dtype=torch.float32)
    weight = out if splits == 1 else q.new_empty((num_seqs, num_heads, splits), dtype=torch.float32)
    _paged_attention[(num_seqs, kv_heads, splits)](
        q, cache, out, partial, weight, batch.block_table, batch.seq_lens, batch.query_starts,
        scale * 1.4426950408889634, batch.block_table.stride(0), cache.stride(0), 0, num_seqs,
        KV_HEADS=kv_heads, REAL_GROUP=num_heads // kv_heads, GROUP=group, HEAD=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size), BLOCK_SIZE=block_size, TILE_TOKENS=1,
        TILE_ROWS=max(DECODE_ROWS, group), TILE_KEYS=DECODE_KEYS, WINDOW=window, SPLITS=splits, IS_DECODE=True,
        SKIPPED_LEN=0, num_warps=DECODE_WARPS, num_stages=DECODE_STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(num_seqs, num_heads)](
            partial, weight, out, batch.query_starts, num_heads,
            HEAD=head_size, HEAD_PAD=triton.next_power_of_2(head_size), SPLITS=splits,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs"])  # they change from step to step
def _paged_attention(
    q, cache, out, partial, weight, block_table, seq_lens, query_starts, scale_log2, table_stride, value_offset,
    first_seq, num_seqs,
    KV_HEADS: tl.constexpr, REAL_GROUP: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, IS_DECODE: tl.constexpr, SKIPPED_LEN: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one sequence against its keys, for the query heads of one key-value head.

    Online softmax (FlashAttention, Dao et al. 2022); with SPLITS > 1 each program takes a share of the keys and leaves
    its unnormalised sum and log2-sum-exp2 for _merge_splits (Flash-Decoding).
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_DECODE:
        seq = tile
        first_token = 0
    else:  # the tiles of sequence s start at tile query_starts[s] // TILE_TOKENS + s, counted from first_seq
        base = tl.load(query_starts + first_seq)
        low, high = first_seq, num_seqs - 1
        while low < high:
            middle = (low + high + 1) // 2
            start_tile = (tl.load(query_starts + middle) - base) // TILE_TOKENS + middle - first_seq
            if start_tile <= tile:
                low = middle
            else:
                high = middle - 1
        seq = low
        first_token = (tile - ((tl.load(query_starts + seq) - base) // TILE_TOKENS + seq - first_seq)) * TILE_TOKENS
    row_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - row_start
    is_other = (query_len != 1) if IS_DECODE else (first_token >= query_len) | (query_len == SKIPPED_LEN)
    if is_other:
        return
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len

    rows = tl.arange(0, TILE_ROWS)
    tokens = first_token + rows // GROUP
    group_head = rows % GROUP
    is_row = (tokens < query_len) & (group_head < REAL_GROUP) & (rows // GROUP < TILE_TOKENS)
    heads = kv_head * REAL_GROUP + group_head
    dims = tl.arange(0, HEAD_PAD)
    row_offsets = ((row_start + tokens) * (KV_HEADS * REAL_GROUP) + heads) * HEAD
    query = tl.load(q + row_offsets[:, None] + dims[None, :], mask=is_row[:, None] & (dims < HEAD)[None, :], other=0.0)
    query_positions = context + tokens

    last_key = tl.minimum(seq_len, context + first_token + TILE_TOKENS)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(0, context + first_token - WINDOW + 1) // TILE_KEYS * TILE_KEYS
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(last_key - first_key, TILE_KEYS), SPLITS) * TILE_KEYS
        first_key = first_key + split * share
        last_key = tl.minimum(last_key, first_key + share)

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, HEAD_PAD], tl.float32)
    table = block_table + seq * table_stride
    cache_head = cache + kv_head * HEAD
    masked_from = first_key
    if WINDOW == 0:  # keys that every row sees need no comparisons
        num_seen = tl.minimum(context + first_token + 1, last_key) - first_key
        masked_from = first_key + tl.maximum(num_seen, 0) // TILE_KEYS * TILE_KEYS
        acc, total, best = _attend_keys(
            acc, total, best, query, query_positions, cache_head, table, value_offset, scale_log2,
            first_key, masked_from, last_key, KV_HEADS, HEAD, HEAD_PAD, BLOCK_SIZE, TILE_KEYS, WINDOW, False,
        )  # fmt: skip
    acc, total, best = _attend_keys(
        acc, total, best, query, query_positions, cache_head, table, value_offset, scale_log2,
        masked_from, last_key, last_key, KV_HEADS, HEAD, HEAD_PAD, BLOCK_SIZE, TILE_KEYS, WINDOW, True,
    )  # fmt: skip

    store_mask = is_row[:, None] & (dims < HEAD)[None, :]
    if SPLITS == 1:
        acc = acc / total[:, None]
        tl.store(out + row_offsets[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=store_mask)
    else:
        split_rows = (seq * (KV_HEADS * REAL_GROUP) + heads) * SPLITS + split
        mean = tl.where(total[:, None] > 0, acc / total[:, None], 0.0)
        tl.store(partial + split_rows[:, None] * HEAD + dims[None, :], mean, mask=store_mask)
        tl.store(weight + split_rows, tl.where(total > 0, best + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit
def _attend_keys(
    acc, total, best, query, query_positions, cache_head, table, value_offset, scale_log2, start, end, last_key,
    KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Go on with an online softmax over the keys start .. end - 1."""
    dims = tl.arange(0, HEAD_PAD)
    for key_start in range(start, end, TILE_KEYS):
        keys = key_start + tl.arange(0, TILE_KEYS)
        is_key = keys < last_key
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0)
        offsets = (blocks * BLOCK_SIZE + keys % BLOCK_SIZE) * (KV_HEADS * HEAD)
        k_at, v_at = offsets[None, :] + dims[:, None], value_offset + offsets[:, None] + dims[None, :]
        if IS_MASKED:
            k = tl.load(cache_head + k_at, mask=is_key[None, :] & (dims < HEAD)[:, None], other=0.0)
        elif HEAD_PAD > HEAD:
            k = tl.load(cache_head + k_at, mask=(dims < HEAD)[:, None], other=0.0)
        else:
            k = tl.load(cache_head + k_at)
        scores = tl.dot(query, k, input_precision="ieee") * scale_log2
        if IS_MASKED:
            visible = is_key[None, :] & (keys[None, :] <= query_positions[:, None])
            if WINDOW > 0:
                visible = visible & (keys[None, :] > query_positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        probs = tl.exp2(scores - safe_best[:, None])
        rescale = tl.exp2(best - safe_best)
        total = total * rescale + tl.sum(probs, 1)
        if IS_MASKED:
            v = tl.load(cache_head + v_at, mask=is_key[:, None] & (dims < HEAD)[None, :], other=0.0)
        elif HEAD_PAD > HEAD:
            v = tl.load(cache_head + v_at, mask=(dims < HEAD)[None, :], other=0.0)
        else:
            v = tl.load(cache_head + v_at)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        best = new_best
    return acc, total, best


@triton.jit
def _merge_splits(
    partial, weight, out, query_starts, num_heads, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, SPLITS: tl.constexpr
):
    """Weigh the splits of one query head by their log2-sum-exp2, in split order."""
    seq, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_starts + seq)
    if tl.load(query_starts + seq + 1) - row != 1:
        return
    source = seq * num_heads + head
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, HEAD_PAD)
    log_weights = tl.load(weight + source * SPLITS + splits)
    shares = tl.exp2(log_weights - tl.max(log_weights, 0))
    values = tl.load(
        partial + (source * SPLITS + splits)[:, None] * HEAD + dims[None, :], mask=(dims < HEAD)[None, :], other=0.0
    )
    merged = tl.sum(values * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + (row * num_heads + head) * HEAD + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD)


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
    q, k, q_out, k_out, cos, sin, q_weight, k_weight, eps, q_row, q_head, k_row, k_head, q_heads, k_heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
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
    target_k = k_out + (row * k_heads + heads - q_heads) * 2 * HALF + dims
    target = tl.where(is_query, target_q, target_k)
    tl.store(target, (first * cosine - second * sine).to(q_out.dtype.element_ty), mask=is_head)
    tl.store(target + HALF, (second * cosine + first * sine).to(q_out.dtype.element_ty), mask=is_head)


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
