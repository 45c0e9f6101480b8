"""Multi-head latent attention in Triton: decode rows and short chunks absorbed, long chunks expanded.

The choice is made once a step, by multiplications; blocks that several chunks share are projected up once for all of
them. Shape legend as in kernels.api. Knows no models.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import AttentionBatch
from kernels.reference_mla import UpProjection
from kernels.triton_attention import Tiling, find_sequence

LOG2_E = 1.4426950408889634


DECODE = Tiling(16, 64, 4, 2)  # rows are the heads of one token; 16 is the tensor cores' smallest tile
ABSORBED = Tiling(64, 64, 8, 2)  # rows are heads, then tokens
EXPANDED = Tiling(64, 64, 4, 2)  # rows are tokens
ATTENTION_COST = 3.5
"""Times that a multiplication takes in attention, absorbed or expanded, of one in a matrix product (H200)."""
MAX_EXPANDED_BYTES = 2**31
"""Keys and values of all heads of a step's chunks take no more than this; with more, chunks are absorbed."""


@dataclass(frozen=True)
class Expansion:
    """The blocks whose latents a step's chunks read, each once, and the block table in terms of them."""

    blocks: Tensor  # int64 [U]
    table: Tensor  # int32 [S, M]: index into ``blocks``; 0 for decodes and padding


def plan_expansion(batch: AttentionBatch, block_size: int, up: UpProjection, rope_size: int) -> Expansion | None:
    """Decide whether the chunks of a step are expanded, and lay out what they read; None: they are absorbed."""
    table, first = batch.host_table, batch.num_decodes
    if table is None or first == len(batch.query_lens):
        return None
    lens, rows = np.asarray(batch.host_seq_lens)[first:], np.asarray(batch.query_lens)[first:]
    num_blocks = -(-lens // block_size)
    is_read = np.arange(table.shape[1]) < num_blocks[:, None]
    blocks, index = np.unique(table[first:][is_read], return_inverse=True)
    (num_heads, key_size, rank), value_size = up.keys.shape, up.values.shape[1]
    num_keys, head_size = len(blocks) * block_size, key_size + value_size
    tiled_rows = -(-rows // EXPANDED.rows) * EXPANDED.rows
    seen = lens - rows / 2  # keys that a row sees, on average; below, multiplications of one head
    absorbed = float((rows * seen).sum()) * (2 * rank + rope_size) + rows.sum() * rank * head_size / ATTENTION_COST
    expanded = float((tiled_rows * seen).sum()) * (head_size + rope_size) + num_keys * rank * head_size / ATTENTION_COST
    if absorbed < expanded:
        return None
    if num_keys * num_heads * head_size * up.keys.itemsize > MAX_EXPANDED_BYTES:
        return None
    local = np.zeros(table.shape, dtype=np.int32)
    local[first:][is_read] = index
    device = batch.block_table.device
    return Expansion(_upload(blocks.astype(np.int64), device), _upload(local, device))


def _upload(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def write_latent(cache: Tensor, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
    """See Kernels.write_latent."""
    rows, rank = latent.shape
    if rows:
        rope = k_rope.shape[1]
        _write_latent[(rows,)](
            cache, slots, latent, k_rope, latent.stride(0), k_rope.stride(0), RANK=rank, ROPE=rope,
            BLOCK=triton.next_power_of_2(rank + rope),
        )  # fmt: skip


def absorb(q: Tensor, up: UpProjection) -> Tensor:
    """Queries [N, H, D] against latents, heads first: [H, N, R]."""
    return torch.bmm(q.transpose(0, 1), up.keys)


def project_values(attended: Tensor, up: UpProjection, out: Tensor) -> None:
    """Attended latents, heads first [H, N, R], into the heads' outputs ``out`` [N, H, Dv]."""
    torch.bmm(attended, up.values.transpose(1, 2), out=out.transpose(0, 1))


def attend_absorbed(q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Absorbed queries q [H, N, R], q_rope [N, H, P] of a step's first N rows against their latents: [H, N, R].

    Keys are cut at absolute positions, so that a row's sums do not depend on the rows beside it; only the length of a
    cut is chosen by their number.
    """
    out = torch.empty_like(q)
    num_seqs, num_decodes = len(batch.query_lens), batch.num_decodes
    if num_seqs == 0:  # lengths are on the device: each kernel passes over the other's runs
        num_seqs = batch.seq_lens.shape[0]
        _attend_chunks(q, q_rope, cache, out, batch, (0, num_seqs), scale)
        num_decodes = num_seqs
    elif num_decodes < q.shape[1]:
        _attend_chunks(q, q_rope, cache, out, batch, (num_decodes, num_seqs), scale)
    if num_decodes:
        _attend_decodes(q, q_rope, cache, out, batch, num_decodes, scale)
    return out


def attend_alike(q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """As ``attend_absorbed``, each row to the bit alike in any batch: a decode is a chunk of one row."""
    out = torch.empty_like(q)
    if out.numel():
        _attend_chunks(q, q_rope, cache, out, batch, (0, batch.seq_lens.shape[0]), scale, skipped_len=0)
    return out


def _attend_decodes(
    q: Tensor, q_rope: Tensor, cache: Tensor, out: Tensor, batch: AttentionBatch, num_seqs: int, scale: float
) -> None:
    """Attend for those of the first ``num_seqs`` sequences that have one row."""
    num_heads, _, rank = q.shape
    split_keys = _split_keys(num_seqs)
    longest = max(batch.host_seq_lens[:num_seqs], default=batch.block_table.shape[1] * cache.shape[1])
    splits = triton.cdiv(longest, split_keys)
    partial = weight = out
    if splits > 1:
        partial = q.new_empty((num_seqs, num_heads, splits, rank), dtype=torch.float32)
        weight = q.new_empty((num_seqs, num_heads, splits), dtype=torch.float32)
    head_tile, tiling = triton.next_power_of_2(num_heads), _fit(DECODE, q.dtype)
    if head_tile > tiling.rows:
        tiling = _fit(ABSORBED, q.dtype)
        head_tile = min(tiling.rows, head_tile)
    _absorbed_attention[(num_seqs, triton.cdiv(num_heads, head_tile), splits)](
        q, q_rope, cache, out, partial, weight, *_common_arguments(q, q_rope, batch, scale), 0, num_seqs, splits,
        HEAD_TILE=head_tile, TILE_TOKENS=1, SPLIT_KEYS=split_keys, IS_DECODE=True,
        SKIPPED_LEN=0, **_constants(q, q_rope, cache, tiling),
    )  # fmt: skip
    if splits > 1:
        _merge_splits[(num_seqs, num_heads)](
            partial, weight, batch.seq_lens, batch.query_starts, out, q.stride(0), splits, HEADS=num_heads, RANK=rank,
            RANK_PAD=_pad(rank), SPLIT_KEYS=split_keys, SPLITS_PAD=triton.next_power_of_2(splits),
        )  # fmt: skip


def _attend_chunks(
    q: Tensor, q_rope: Tensor, cache: Tensor, out: Tensor, batch: AttentionBatch, seqs: tuple[int, int], scale: float,
    *, skipped_len: int = 1,
) -> None:  # fmt: skip
    """Attend for those of the sequences first .. last - 1 in ``seqs`` that have not just ``skipped_len`` rows."""
    num_heads, num_rows, _ = q.shape
    first, last = seqs
    tiling = _fit(ABSORBED, q.dtype)
    head_tile = min(tiling.rows, triton.next_power_of_2(num_heads))
    tile_tokens = tiling.rows // head_tile
    _absorbed_attention[((num_rows - first) // tile_tokens + last - first, triton.cdiv(num_heads, head_tile), 1)](
        q, q_rope, cache, out, out, out, *_common_arguments(q, q_rope, batch, scale), first, last, 1,
        HEAD_TILE=head_tile, TILE_TOKENS=tile_tokens, SPLIT_KEYS=0, IS_DECODE=False,
        SKIPPED_LEN=skipped_len,
        **_constants(q, q_rope, cache, tiling),
    )  # fmt: skip


def _common_arguments(q: Tensor, q_rope: Tensor, batch: AttentionBatch, scale: float) -> tuple[Any, ...]:
    strides = batch.block_table.stride(0), q.stride(0), q_rope.stride(0), q_rope.stride(1)
    return batch.block_table, batch.seq_lens, batch.query_starts, scale * LOG2_E, *strides


def _constants(q: Tensor, q_rope: Tensor, cache: Tensor, tiling: Tiling) -> dict[str, int]:
    return {
        "HEADS": q.shape[0],
        "RANK": q.shape[2],
        "RANK_PAD": _pad(q.shape[2]),
        "ROPE": q_rope.shape[2],
        "ROPE_PAD": _pad(q_rope.shape[2]),
        "BLOCK_SIZE": cache.shape[1],
        "TILE_ROWS": tiling.rows,
        "TILE_KEYS": tiling.keys,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }


def attend_expanded(
    q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, expansion: Expansion, up: UpProjection,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Queries q [N, H, D], q_rope [N, H, P] of all rows after the decodes, into ``out`` [N, H, Dv]."""
    (num_heads, key_size, rank), value_size = up.keys.shape, up.values.shape[1]
    latents = cache.index_select(0, expansion.blocks).flatten(0, 2)  # [U * B, R + P]
    expanded = torch.mm(latents[:, :rank], up.both.t())  # [U * B, H * (D + Dv)]
    first, num_seqs, num_rows = batch.num_decodes, len(batch.query_lens), len(q)
    rope_size = q_rope.shape[2]
    tiling = _fit(EXPANDED, q.dtype)
    num_tiles = num_rows // tiling.rows + num_seqs - first
    _expanded_attention[(num_tiles, num_heads)](
        q, q_rope, expanded, latents, out, expansion.table, batch.seq_lens, batch.query_starts, scale * LOG2_E,
        expansion.table.stride(0), q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1), first, num_seqs,
        HEADS=num_heads, KEY=key_size, KEY_PAD=_pad(key_size), ROPE=rope_size, ROPE_PAD=_pad(rope_size),
        VALUE=value_size, VALUE_PAD=_pad(value_size), RANK=rank, BLOCK_SIZE=cache.shape[1],
        TILE_TOKENS=tiling.rows, TILE_KEYS=tiling.keys, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip


def _fit(tiling: Tiling, dtype: torch.dtype) -> Tiling:
    """The tiling is for two bytes a value; with four, less of it fits into shared memory."""
    return tiling if dtype.itemsize <= 2 else Tiling(max(16, tiling.rows // 4), 16, tiling.num_warps, 1)


def _split_keys(num_rows: int) -> int:
    """Keys of one program: few enough that few rows fill the device, many enough that merging costs little."""
    if num_rows >= 128:
        return 512
    return 256 if num_rows > 32 else 128


def _pad(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # the tensor cores' smallest depth


@triton.jit
def _write_latent(
    cache, slots, latent, k_rope, latent_row, rope_row, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr
):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    is_latent = at < RANK
    is_rope = (at >= RANK) & (at < RANK + ROPE)
    values = tl.load(latent + row * latent_row + at, mask=is_latent, other=0.0)
    rotated = tl.load(k_rope + row * rope_row + at - RANK, mask=is_rope, other=0.0)
    target = cache + tl.load(slots + row) * (RANK + ROPE) + at
    tl.store(target, tl.where(is_latent, values, rotated), mask=is_latent | is_rope)


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs", "splits"])
def _absorbed_attention(
    q, q_rope, cache, out, partial, weight, block_table, seq_lens, query_starts, scale_log2,
    table_stride, q_head, rope_row, rope_head, first_seq, num_seqs, splits,
    HEADS: tl.constexpr, HEAD_TILE: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, SPLIT_KEYS: tl.constexpr, IS_DECODE: tl.constexpr, SKIPPED_LEN: tl.constexpr,
):  # fmt: skip
    """One tile of rows (token, head) of one sequence against its latents, which are keys and values at once.

    Of a decode a program takes SPLIT_KEYS keys; where there are more, it leaves its mean and log2-sum-exp2 for
    _merge_splits.
    """
    tile, head_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq, first_token = tile, 0
    if not IS_DECODE:
        seq, first_token = find_sequence(tile, query_starts, first_seq, num_seqs, TILE_TOKENS)
    row_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - row_start
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len
    last_key = tl.minimum(seq_len, context + first_token + TILE_TOKENS).to(tl.int32)
    first_key = 0
    if IS_DECODE:
        first_key = split * SPLIT_KEYS
        last_key = tl.minimum(last_key, first_key + SPLIT_KEYS)
    is_other = (query_len != 1) if IS_DECODE else (query_len == SKIPPED_LEN)
    if is_other | (first_token >= query_len) | (first_key >= last_key):
        return

    rows = tl.arange(0, TILE_ROWS)
    tokens, heads = first_token + rows // HEAD_TILE, head_tile * HEAD_TILE + rows % HEAD_TILE
    is_row = (tokens < query_len) & (heads < HEADS) & (rows // HEAD_TILE < TILE_TOKENS)
    ranks, ropes = tl.arange(0, RANK_PAD), tl.arange(0, ROPE_PAD)
    q_at = heads.to(tl.int64) * q_head + (row_start + tokens) * RANK
    rope_at = (row_start + tokens) * rope_row + heads * rope_head
    query = tl.load(q + q_at[:, None] + ranks[None, :], mask=is_row[:, None] & (ranks < RANK)[None, :], other=0.0)
    query_rope = tl.load(
        q_rope + rope_at[:, None] + ropes[None, :], mask=is_row[:, None] & (ropes < ROPE)[None, :], other=0.0
    )
    query_positions = context + tokens

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, RANK_PAD], tl.float32)
    table = block_table + seq * table_stride
    for key_start in range(first_key, last_key, TILE_KEYS):
        keys = key_start + tl.arange(0, TILE_KEYS)
        is_key = keys < last_key
        if BLOCK_SIZE % TILE_KEYS == 0:
            block = tl.load(table + key_start // BLOCK_SIZE)
            slots = block * BLOCK_SIZE + key_start % BLOCK_SIZE + tl.arange(0, TILE_KEYS)
        else:
            slots = tl.load(table + keys // BLOCK_SIZE, mask=is_key, other=0) * BLOCK_SIZE + keys % BLOCK_SIZE
        at = cache + slots[:, None].to(tl.int64) * (RANK + ROPE)
        latent = tl.load(at + ranks[None, :], mask=is_key[:, None] & (ranks < RANK)[None, :], other=0.0)
        rope = tl.load(at + RANK + ropes[None, :], mask=is_key[:, None] & (ropes < ROPE)[None, :], other=0.0)
        scores = tl.dot(query_rope, tl.trans(rope), input_precision="ieee")
        scores = tl.dot(query, tl.trans(latent), scores, input_precision="ieee") * scale_log2
        visible = is_key[None, :] & (keys[None, :] <= query_positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        probs = tl.exp2(scores - safe_best[:, None])
        rescale = tl.exp2(best - safe_best)
        total = total * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(latent.dtype), latent, acc * rescale[:, None], input_precision="ieee")
        best = new_best

    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    store_mask = is_row[:, None] & (ranks < RANK)[None, :]
    is_whole = seq_len > 0
    if IS_DECODE:
        is_whole = seq_len <= SPLIT_KEYS
    if is_whole:
        tl.store(out + q_at[:, None] + ranks[None, :], mean.to(out.dtype.element_ty), mask=store_mask)
    else:
        split_at = (seq.to(tl.int64) * HEADS + heads) * splits + split
        tl.store(partial + split_at[:, None] * RANK + ranks[None, :], mean, mask=store_mask)
        tl.store(weight + split_at, best + tl.log2(total), mask=is_row)


@triton.jit(do_not_specialize=["splits"])
def _merge_splits(
    partial, weight, seq_lens, query_starts, out, out_head, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr, SPLIT_KEYS: tl.constexpr, SPLITS_PAD: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one head of a sequence with one row by their log2-sum-exp2, in split order."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = tl.load(query_starts + seq)
    num_splits = tl.cdiv(tl.load(seq_lens + seq), SPLIT_KEYS)
    if (num_splits > 1) & (tl.load(query_starts + seq + 1) == row + 1):
        at, ranks = tl.arange(0, SPLITS_PAD), tl.arange(0, RANK_PAD)
        base = (seq * HEADS + head) * splits
        log_weights = tl.load(weight + base + at, mask=at < num_splits, other=float("-inf"))
        best = tl.max(log_weights, 0)
        whole = tl.sum(tl.exp2(log_weights - best), 0)
        merged = tl.zeros([RANK_PAD], tl.float32)
        for split in range(num_splits):
            share = tl.exp2(tl.load(weight + base + split) - best)
            merged += share * tl.load(partial + (base + split) * RANK + ranks, mask=ranks < RANK, other=0.0)
        tl.store(
            out + head * out_head + row * RANK + ranks, (merged / whole).to(out.dtype.element_ty), mask=ranks < RANK
        )


@triton.jit(do_not_specialize=["table_stride", "first_seq", "num_seqs"])
def _expanded_attention(
    q, q_rope, expanded, latents, out, table, seq_lens, query_starts, scale_log2,
    table_stride, q_row, q_head, rope_row, rope_head, first_seq, num_seqs,
    HEADS: tl.constexpr, KEY: tl.constexpr, KEY_PAD: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, RANK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head and sequence against that head's keys (its own part, and the shared rotated one).

    ``latents`` [U * B, R + P] gives the rotated keys, ``expanded`` [U * B, H * (D + Dv)] the head's keys and values.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    seq, first_token = find_sequence(tile, query_starts, first_seq, num_seqs, TILE_TOKENS)
    row_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - row_start
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len
    row_base = row_start - tl.load(query_starts + first_seq)

    tokens = first_token + tl.arange(0, TILE_TOKENS)
    is_row = tokens < query_len
    dims, ropes, values = tl.arange(0, KEY_PAD), tl.arange(0, ROPE_PAD), tl.arange(0, VALUE_PAD)
    rows = row_base + tokens
    query = tl.load(
        q + rows[:, None] * q_row + head * q_head + dims[None, :],
        mask=is_row[:, None] & (dims < KEY)[None, :],
        other=0.0,
    )
    query_rope = tl.load(
        q_rope + rows[:, None] * rope_row + head * rope_head + ropes[None, :],
        mask=is_row[:, None] & (ropes < ROPE)[None, :],
        other=0.0,
    )
    query_positions = context + tokens
    last_key = tl.minimum(seq_len, context + first_token + TILE_TOKENS).to(tl.int32)

    best = tl.full([TILE_TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_TOKENS], tl.float32)
    acc = tl.zeros([TILE_TOKENS, VALUE_PAD], tl.float32)
    for key_start in range(0, last_key, TILE_KEYS):
        keys = key_start + tl.arange(0, TILE_KEYS)
        is_key = keys < last_key
        blocks = tl.load(table + seq * table_stride + keys // BLOCK_SIZE, mask=is_key, other=0)
        slots = (blocks * BLOCK_SIZE + keys % BLOCK_SIZE).to(tl.int64)
        own_at = expanded + slots * (HEADS * (KEY + VALUE)) + head * (KEY + VALUE)
        k = tl.load(own_at[None, :] + dims[:, None], mask=is_key[None, :] & (dims < KEY)[:, None], other=0.0)
        rope_at = latents + slots * (RANK + ROPE) + RANK
        k_rope = tl.load(rope_at[None, :] + ropes[:, None], mask=is_key[None, :] & (ropes < ROPE)[:, None], other=0.0)
        scores = tl.dot(query_rope, k_rope, input_precision="ieee")
        scores = tl.dot(query, k, scores, input_precision="ieee") * scale_log2
        visible = is_key[None, :] & (keys[None, :] <= query_positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        probs = tl.exp2(scores - safe_best[:, None])
        rescale = tl.exp2(best - safe_best)
        total = total * rescale + tl.sum(probs, 1)
        v = tl.load(
            own_at[:, None] + KEY + values[None, :], mask=is_key[:, None] & (values < VALUE)[None, :], other=0.0
        )
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        best = new_best
    acc = acc / total[:, None]
    target = out + (rows[:, None] * HEADS + head) * VALUE + values[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (values < VALUE)[None, :])
