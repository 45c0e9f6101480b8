"""Masks and sampling in Triton: one program reads a row of logits twice. Knows no filters that need sorted logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import SamplingBatch

BLOCK = 4096


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """See Kernels.apply_token_bitmask."""
    rows, vocab = logits.shape
    if rows:
        grid = (rows, triton.cdiv(vocab, BLOCK))
        _apply_bitmask[grid](logits, bitmask, logits.stride(0), bitmask.stride(0), vocab, BLOCK=BLOCK)


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """See Kernels.sample, for batches without top-k and top-p."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        min_p = batch.temperature if batch.min_p is None else batch.min_p
        _sample[(rows,)](
            logits, batch.temperature, batch.seeds, batch.positions, min_p, tokens, logprobs, logits.stride(0), vocab,
            IS_GREEDY=batch.is_all_greedy, HAS_MIN_P=batch.min_p is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _apply_bitmask(logits, bitmask, logits_stride, mask_stride, vocab, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    words = tl.load(bitmask + row * mask_stride + columns // 32, mask=inside, other=-1)
    is_banned = ((words >> (columns % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + columns, float("-inf"), mask=inside & is_banned)


@triton.jit
def _uniform(seed, position):
    """kernels.sampling.uniform, purpose 0."""
    counter = (position * 3 + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    mixed = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + counter)
    return (mixed >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _sample(
    logits, temperatures, seeds, positions, min_ps, tokens, logprobs, stride, vocab,
    IS_GREEDY: tl.constexpr, HAS_MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pass one: the largest logit, its first index, and the sum of exponentials. Pass two: the first index at which the
    running sum of the tempered, filtered exponentials exceeds u times their total. -1 where every logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    best, best_at, total = float("-inf"), 0, 0.0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
        block_best = tl.max(values, 0)
        new_best = tl.maximum(best, block_best)
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        total = total * tl.exp(best - safe_best) + tl.sum(tl.exp(values - safe_best), 0)
        block_at = tl.min(tl.where(values == block_best, columns, vocab), 0)
        best_at = tl.where(block_best > best, block_at, best_at)
        best = new_best
    is_dead = best == float("-inf")
    token = best_at
    if not IS_GREEDY:
        temperature = tl.load(temperatures + row)
        if (temperature > 0) & (best > float("-inf")):
            u = _uniform(tl.load(seeds + row), tl.load(positions + row))
            floor = float("-inf")
            if HAS_MIN_P:
                floor = tl.log(tl.load(min_ps + row))
            mass = u * 0.0  # of float64, as the draws are
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
                scaled = (values - best) / temperature
                mass += tl.sum(tl.where(scaled >= floor, tl.exp(scaled), 0.0).to(tl.float64), 0)
            point = u * mass
            before = u * 0.0
            token = vocab
            for start in range(0, vocab, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
                scaled = (values - best) / temperature
                weights = tl.where(scaled >= floor, tl.exp(scaled), 0.0).to(tl.float64)
                is_past = (before + tl.cumsum(weights, 0) > point) & (weights > 0)
                token = tl.minimum(token, tl.min(tl.where(is_past, columns, vocab), 0))
                before += tl.sum(weights, 0)
            token = tl.where(token == vocab, best_at, token)  # the point rounded up to the total
    chosen = tl.load(logits + row * stride + token)
    tl.store(tokens + row, tl.where(is_dead, -1, token))
    tl.store(logprobs + row, tl.where(is_dead, float("-inf"), chosen - best - tl.log(total)))
