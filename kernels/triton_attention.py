"""Paged attention of grouped heads in Triton: runs of any length, decode rows, and what decode rows share.

Grids depend on shapes only, lengths are read on the device, so that a CUDA graph can hold it all. Knows no schedules.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import AttentionBatch


@dataclass(frozen=True)
class Tiling:
    """Rows and keys that a program holds at once, its warps and the stages of its pipeline."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


PREFILL_TILE = 128  # query rows (token, head of the group) of one program
PREFILL_KEYS, PREFILL_WARPS, PREFILL_STAGES = 32, 4, 3
PREFILL = Tiling(PREFILL_TILE, PREFILL_KEYS, PREFILL_WARPS, PREFILL_STAGES)
ALIKE, ALIKE_FLOAT32 = Tiling(64, 64, 4, 3), Tiling(16, 16, 4, 1)  # 64 rows: as many as wgmma multiplies at once
DECODE_KEYS, DECODE_WARPS, DECODE_STAGES = 64, 2, 2
DECODE_ROWS = 16  # smallest tile of the tensor cores: the heads of one group, padded
NUM_PROGRAMS = 1056  # eight per streaming multiprocessor of an H100 or H200: decode splits keys until it has so many
MAX_SPLITS = 16
SHARED_SPLITS = 4
"""Parts of the keys that decode rows share: their tiles are few."""


def attend(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    """See Kernels.attention; ``window`` 0: none."""
    out = torch.empty_like(q)
    num_seqs, num_decodes = len(batch.query_lens), batch.num_decodes
    if num_seqs == 0:  # lengths are on the device: each kernel passes over the other's runs
        num_seqs = num_decodes = batch.seq_lens.shape[0]
        _attend_runs(q, cache, out, batch, (0, num_seqs), scale, window, is_mixed=True)
    elif num_seqs > num_decodes:
        _attend_runs(q, cache, out, batch, (num_decodes, num_seqs), scale, window)
    if num_decodes:
        _attend_decode(q, cache, out, batch, num_decodes, scale, window)
    return out


def attend_alike(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, window: int) -> Tensor:
    """As ``attend``, each row to the bit alike in any batch: every row goes through one compiled kernel.

    A program walks all keys of its rows in tiles that lie at absolute positions; tiles that a row does not see add
    zeros to it. Few rows of many keys leave most of the device idle.
    """
    out = torch.empty_like(q)
    tiling = ALIKE_FLOAT32 if q.dtype == torch.float32 else ALIKE
    if len(q):
        _attend_runs(
            q, cache, out, batch, (0, batch.seq_lens.shape[0]), scale, window, tiling=tiling, can_contract=False
        )
    return out


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
    tiling: Tiling = PREFILL,
    can_contract: bool = True,
) -> None:
    """Attend for the sequences first .. last - 1 in ``seqs``; ``is_mixed``: for those with more than one row.

    ``can_contract``: multiplications and additions may be fused, here and not there.
    """
    _, num_heads, head_size = q.shape
    block_size, kv_heads = cache.shape[2], cache.shape[3]
    group = triton.next_power_of_2(num_heads // kv_heads)
    tile_tokens = max(1, tiling.rows // group)
    first, last = seqs
    num_tiles = (q.shape[0] - first) // tile_tokens + (last - first)
    _paged_attention[(num_tiles, kv_heads, 1)](
        q, cache, out, out, out, batch.block_table, batch.seq_lens, batch.query_starts, batch.seq_lens,
        scale * 1.4426950408889634, batch.block_table.stride(0), cache.stride(0), first, last,
        KV_HEADS=kv_heads, REAL_GROUP=num_heads // kv_heads, GROUP=group, HEAD=head_size,
        HEAD_PAD=triton.next_power_of_2(head_size), BLOCK_SIZE=block_size, TILE_TOKENS=tile_tokens,
        TILE_ROWS=max(DECODE_ROWS, tile_tokens * group), TILE_KEYS=tiling.keys, WINDOW=window, SPLITS=1,
        SLOTS=1, FIRST_SLOT=0, IS_DECODE=False, SKIPPED_LEN=int(is_mixed),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, enable_fp_fusion=can_contract,
    )  # fmt: skip


def _attend_decode(
    q: Tensor, cache: Tensor, out: Tensor, batch: AttentionBatch, num_seqs: int, scale: float, window: int
) -> None:
    """Attend for those of the first ``num_seqs`` sequences that have one row; what they share is read once for all."""
    _, num_heads, head_size = q.shape
    block_size, kv_heads = cache.shape[2], cache.shape[3]
    group = triton.next_power_of_2(num_heads // kv_heads)
    splits = min(MAX_SPLITS, triton.next_power_of_2(max(1, NUM_PROGRAMS // (num_seqs * kv_heads))))
    shared = None if window else batch.shared
    num_shared = 0 if shared is None else SHARED_SPLITS
    slots = splits + num_shared
    partial = out if slots == 1 else q.new_empty((num_seqs, num_heads, slots, head_size), dtype=torch.float32)
    weight = out if slots == 1 else q.new_empty((num_seqs, num_heads, slots), dtype=torch.float32)
    scale_log2, table_stride = scale * 1.4426950408889634, batch.block_table.stride(0)
    layout = {
        "KV_HEADS": kv_heads, "REAL_GROUP": num_heads // kv_heads, "GROUP": group, "HEAD": head_size,
        "HEAD_PAD": triton.next_power_of_2(head_size), "BLOCK_SIZE": block_size, "SLOTS": slots,
    }  # fmt: skip
    if shared is not None:
        tile_seqs = max(1, PREFILL_TILE // group)
        _shared_attention[(triton.cdiv(num_seqs, tile_seqs), kv_heads, num_shared)](
            q, cache, partial, weight, batch.block_table, batch.query_starts, shared, scale_log2, table_stride,
            cache.stride(0), num_seqs, TILE_SEQS=tile_seqs, TILE_ROWS=max(DECODE_ROWS, tile_seqs * group),
            TILE_KEYS=PREFILL_KEYS, SHARED_SPLITS=num_shared, **layout,
            num_warps=PREFILL_WARPS, num_stages=PREFILL_STAGES,
        )  # fmt: skip
    _paged_attention[(num_seqs, kv_heads, splits)](
        q, cache, out, partial, weight, batch.block_table, batch.seq_lens, batch.query_starts,
        batch.seq_lens if shared is None else shared, scale_log2, table_stride, cache.stride(0), 0, num_seqs,
        TILE_TOKENS=1, TILE_ROWS=max(DECODE_ROWS, group), TILE_KEYS=DECODE_KEYS, WINDOW=window, SPLITS=splits,
        FIRST_SLOT=num_shared, IS_DECODE=True, SKIPPED_LEN=0, **layout,
        num_warps=DECODE_WARPS, num_stages=DECODE_STAGES,
    )  # fmt: skip
    if slots > 1:
        _merge_slots[(num_seqs, num_heads)](
            partial, weight, out, batch.query_starts, batch.seq_lens if shared is None else shared, num_heads,
            HEAD=head_size, HEAD_PAD=layout["HEAD_PAD"], SLOTS=slots, SLOTS_PAD=triton.next_power_of_2(slots),
            FIRST_SLOT=num_shared,
        )  # fmt: skip


@triton.jit
def find_sequence(tile, query_starts, first_seq, num_seqs, TILE_TOKENS: tl.constexpr):
    """The sequence of a tile and its first token: the tiles of sequence s start at query_starts[s] // TILE_TOKENS + s,
    counted from ``first_seq``."""
    base = tl.load(query_starts + first_seq)
    low, high = first_seq, num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        start_tile = (tl.load(query_starts + middle) - base) // TILE_TOKENS + middle - first_seq
        if start_tile <= tile:
            low = middle
        else:
            high = middle - 1
    first_tile = (tl.load(query_starts + low) - base) // TILE_TOKENS + low - first_seq
    return low, (tile - first_tile) * TILE_TOKENS


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs"])  # they change from step to step
def _paged_attention(
    q, cache, out, partial, weight, block_table, seq_lens, query_starts, shared, scale_log2, table_stride, value_offset,
    first_seq, num_seqs,
    KV_HEADS: tl.constexpr, REAL_GROUP: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, FIRST_SLOT: tl.constexpr,
    IS_DECODE: tl.constexpr, SKIPPED_LEN: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one sequence against its keys, for the query heads of one key-value head.

    Online softmax (FlashAttention, Dao et al. 2022); with SPLITS > 1 each program takes a share of the keys. With
    SLOTS > 1 it leaves its mean and log2-sum-exp2 for _merge_slots (Flash-Decoding); with FIRST_SLOT the keys that all
    decode rows share are left to _shared_attention.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, first_token = tile, 0
    if not IS_DECODE:
        seq, first_token = find_sequence(tile, query_starts, first_seq, num_seqs, TILE_TOKENS)
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
    first_key = tl.load(shared) if FIRST_SLOT > 0 else 0
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
    if SLOTS == 1:
        acc = acc / total[:, None]
        tl.store(out + row_offsets[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=store_mask)
    else:
        slots = (seq * (KV_HEADS * REAL_GROUP) + heads) * SLOTS + FIRST_SLOT + split
        _store_slots(partial, weight, slots, acc, total, best, is_row, HEAD, HEAD_PAD)


@triton.jit
def _store_slots(partial, weight, slots, acc, total, best, is_row, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr):
    dims = tl.arange(0, HEAD_PAD)
    mean = tl.where(total[:, None] > 0, acc / total[:, None], 0.0)
    tl.store(partial + slots[:, None] * HEAD + dims[None, :], mean, mask=is_row[:, None] & (dims < HEAD)[None, :])
    tl.store(weight + slots, tl.where(total > 0, best + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit(do_not_specialize=["table_stride", "num_seqs"])
def _shared_attention(
    q, cache, partial, weight, block_table, query_starts, shared, scale_log2, table_stride, value_offset, num_seqs,
    KV_HEADS: tl.constexpr, REAL_GROUP: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SLOTS: tl.constexpr, TILE_SEQS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, SHARED_SPLITS: tl.constexpr,
):  # fmt: skip
    """A tile of decode rows of many sequences against a share of the keys that all of them begin with (cascade)."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_keys = tl.load(shared)
    if num_keys == 0:
        return
    rows = tl.arange(0, TILE_ROWS)
    seqs, group_head = tile * TILE_SEQS + rows // GROUP, rows % GROUP
    is_row = (seqs < num_seqs) & (group_head < REAL_GROUP) & (rows // GROUP < TILE_SEQS)
    starts = tl.load(query_starts + seqs, mask=is_row, other=0)
    is_row = is_row & (tl.load(query_starts + seqs + 1, mask=is_row, other=0) - starts == 1)
    heads = kv_head * REAL_GROUP + group_head
    dims = tl.arange(0, HEAD_PAD)
    row_offsets = (starts * (KV_HEADS * REAL_GROUP) + heads) * HEAD
    query = tl.load(q + row_offsets[:, None] + dims[None, :], mask=is_row[:, None] & (dims < HEAD)[None, :], other=0.0)

    share = tl.cdiv(tl.cdiv(num_keys, TILE_KEYS), SHARED_SPLITS) * TILE_KEYS
    first_key = split * share
    last_key = tl.minimum(num_keys, first_key + share)
    masked_from = first_key + tl.maximum(last_key - first_key, 0) // TILE_KEYS * TILE_KEYS
    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, HEAD_PAD], tl.float32)
    positions = tl.zeros([TILE_ROWS], tl.int64) + num_keys  # every row sees all of them
    table = block_table + tl.load(shared + 1) * table_stride
    cache_head = cache + kv_head * HEAD
    acc, total, best = _attend_keys(
        acc, total, best, query, positions, cache_head, table, value_offset, scale_log2,
        first_key, masked_from, last_key, KV_HEADS, HEAD, HEAD_PAD, BLOCK_SIZE, TILE_KEYS, 0, False,
    )  # fmt: skip
    acc, total, best = _attend_keys(
        acc, total, best, query, positions, cache_head, table, value_offset, scale_log2,
        masked_from, last_key, last_key, KV_HEADS, HEAD, HEAD_PAD, BLOCK_SIZE, TILE_KEYS, 0, True,
    )  # fmt: skip
    slots = (seqs * (KV_HEADS * REAL_GROUP) + heads) * SLOTS + split
    _store_slots(partial, weight, slots, acc, total, best, is_row, HEAD, HEAD_PAD)


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
def _merge_slots(
    partial, weight, out, query_starts, shared, num_heads, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, FIRST_SLOT: tl.constexpr,
):  # fmt: skip
    """Weigh the parts of a query head by their log2-sum-exp2, in order; the first are there if keys are shared."""
    seq, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_starts + seq)
    if tl.load(query_starts + seq + 1) - row != 1:
        return
    source = (seq * num_heads + head) * SLOTS
    slots, dims = tl.arange(0, SLOTS_PAD), tl.arange(0, HEAD_PAD)
    is_slot = slots < SLOTS
    if FIRST_SLOT > 0:
        is_slot = is_slot & (slots >= tl.where(tl.load(shared) > 0, 0, FIRST_SLOT))
    log_weights = tl.load(weight + source + slots, mask=is_slot, other=float("-inf"))
    shares = tl.exp2(log_weights - tl.max(log_weights, 0))
    values = tl.load(
        partial + (source + slots)[:, None] * HEAD + dims[None, :],
        mask=is_slot[:, None] & (dims < HEAD)[None, :],
        other=0.0,
    )
    merged = tl.sum(values * shares[:, None], 0) / tl.sum(shares, 0)
    tl.store(out + (row * num_heads + head) * HEAD + dims, merged.to(out.dtype.element_ty), mask=dims < HEAD)
