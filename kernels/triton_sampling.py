"""Masks and sampling in Triton: a row of logits is read in chunks side by side. Knows no filters that need sorting."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import SamplingBatch

BLOCK = 4096


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """See Kernels.apply_token_bitmask."""
    num_rows, vocab = logits.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab, BLOCK))
        _apply_bitmask[grid](logits, bitmask, rows, logits.stride(0), bitmask.stride(0), vocab, BLOCK=BLOCK)


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """See Kernels.sample, for batches without top-k and top-p."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, logprobs
    chunks = triton.cdiv(vocab, BLOCK)
    best, total = (torch.empty((rows, chunks), dtype=torch.float32, device=logits.device) for _ in range(2))
    best_at = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    mass, min_p = best, batch.temperature if batch.min_p is None else batch.min_p
    shapes = {"NUM_CHUNKS": triton.next_power_of_2(chunks), "BLOCK": BLOCK}
    _scan_chunks[(rows, chunks)](logits, best, best_at, total, logits.stride(0), vocab, chunks, BLOCK=BLOCK)
    if not batch.is_all_greedy:
        mass = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
        _weigh_chunks[(rows, chunks)](
            logits, best, batch.temperature, min_p, mass, logits.stride(0), vocab, chunks,
            HAS_MIN_P=batch.min_p is not None, **shapes, enable_fp_fusion=False,
        )  # fmt: skip
    _pick[(rows,)](
        logits, best, best_at, total, mass, batch.temperature, batch.seeds, batch.positions, min_p, tokens, logprobs,
        logits.stride(0), vocab, chunks, IS_GREEDY=batch.is_all_greedy, HAS_MIN_P=batch.min_p is not None, **shapes,
        enable_fp_fusion=False,  # a row's bits do not depend on what others ask for
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _apply_bitmask(logits, bitmask, rows, logits_stride, mask_stride, vocab, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    words = tl.load(bitmask + tl.load(rows + row).to(tl.int64) * mask_stride + columns // 32, mask=inside, other=-1)
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
def _scan_chunks(logits, best, best_at, total, stride, vocab, chunks, BLOCK: tl.constexpr):
    """The largest logit of a chunk, its first index, and the sum of exponentials relative to it."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
    largest = tl.max(values, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    tl.store(best + row * chunks + chunk, largest)
    tl.store(best_at + row * chunks + chunk, tl.min(tl.where(values == largest, columns, vocab), 0))
    tl.store(total + row * chunks + chunk, tl.sum(tl.exp(values - base), 0))


@triton.jit
def _row_best(best, row, chunks, NUM_CHUNKS: tl.constexpr):
    at = tl.arange(0, NUM_CHUNKS)
    return tl.max(tl.load(best + row * chunks + at, mask=at < chunks, other=float("-inf")), 0)


@triton.jit
def _weights(logits, row, columns, stride, vocab, largest, temperatures, min_ps, HAS_MIN_P: tl.constexpr):
    """Tempered, filtered exponentials of a chunk, float64; of a greedy row or one without a token, anything finite."""
    temperature = tl.load(temperatures + row)
    values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    scaled = (values - largest) / tl.where(temperature > 0, temperature, 1.0)
    weights = tl.exp(scaled)
    if HAS_MIN_P:
        weights = tl.where(scaled >= tl.log(tl.load(min_ps + row)), weights, 0.0)
    return weights.to(tl.float64)


@triton.jit
def _weigh_chunks(
    logits, best, temperatures, min_ps, mass, stride, vocab, chunks,
    HAS_MIN_P: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = _row_best(best, row, chunks, NUM_CHUNKS)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(logits, row, columns, stride, vocab, largest, temperatures, min_ps, HAS_MIN_P)
    tl.store(mass + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit
def _pick(
    logits, best, best_at, total, mass, temperatures, seeds, positions, min_ps, tokens, logprobs, stride, vocab, chunks,
    IS_GREEDY: tl.constexpr, HAS_MIN_P: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Greedy: the first of the largest logits. Otherwise the chunk, and in it the first index, at which the running sum
    of the weights exceeds u times their total. -1 where every logit is -inf."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NUM_CHUNKS)
    inside = at < chunks
    of_chunk = row * chunks + at
    bests = tl.load(best + of_chunk, mask=inside, other=float("-inf"))
    largest = tl.max(bests, 0)
    is_dead = largest == float("-inf")
    base = tl.where(is_dead, 0.0, largest)
    sums = tl.load(total + of_chunk, mask=inside, other=0.0)
    normalizer = tl.sum(tl.where(bests > float("-inf"), sums * tl.exp(bests - base), 0.0), 0)
    token = tl.min(tl.where(inside & (bests == largest), tl.load(best_at + of_chunk, mask=inside, other=0), vocab), 0)
    if not IS_GREEDY:  # noqa: SIM102 - the inner condition is on the device
        if (tl.load(temperatures + row) > 0) & (largest > float("-inf")):
            masses = tl.load(mass + of_chunk, mask=inside, other=0.0)
            point = _uniform(tl.load(seeds + row), tl.load(positions + row)) * tl.sum(masses, 0)
            reached = tl.cumsum(masses, 0)
            last = tl.max(tl.where(masses > 0, at, 0), 0)  # where the point rounded up to the total
            chunk = tl.min(tl.where((reached > point) & (masses > 0), at, last), 0)
            before = tl.sum(tl.where(at < chunk, masses, 0.0), 0)
            columns = chunk * BLOCK + tl.arange(0, BLOCK)
            weights = _weights(logits, row, columns, stride, vocab, largest, temperatures, min_ps, HAS_MIN_P)
            is_past = (before + tl.cumsum(weights, 0) > point) & (weights > 0)
            last_column = tl.max(tl.where(weights > 0, columns, 0), 0)
            token = tl.min(tl.where(is_past, columns, last_column), 0)
    token = tl.where(is_dead, 0, token)
    chosen = tl.load(logits + row * stride + token)
    tl.store(tokens + row, tl.where(is_dead, -1, token))
    tl.store(logprobs + row, tl.where(is_dead, float("-inf"), chosen - largest - tl.log(normalizer)))
