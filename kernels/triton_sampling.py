"""Masks and sampling in Triton: a row of logits is read in chunks side by side, and its filters sort nothing.

A row's values are held as distances: how far, at its temperature, they lie below the largest. Filters keep the nearest
and are together one cut: a distance, and the last column of those just as far. The host waits for nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import SamplingBatch

BLOCK = 4096
RADIX_BITS = 4
"""Bits of a distance that a pass over a row settles."""
FILTER_BLOCK = 1024  # a thread has one column, and a sum in registers for each value of a digit
FILTER_WARPS = 32


def apply_token_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """See Kernels.apply_token_bitmask."""
    num_rows, vocab = logits.shape
    if num_rows:
        grid = (num_rows, triton.cdiv(vocab, BLOCK))
        _apply_bitmask[grid](logits, bitmask, rows, logits.stride(0), bitmask.stride(0), vocab, BLOCK=BLOCK)


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """See Kernels.sample. A row's bits do not depend on what others ask for."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, logprobs
    chunks = triton.cdiv(vocab, BLOCK)
    best, total = (torch.empty((rows, chunks), dtype=torch.float32, device=logits.device) for _ in range(2))
    best_at = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    mass = best
    cuts: tuple[Tensor | None, Tensor | None] = None, None
    shapes = {"NUM_CHUNKS": triton.next_power_of_2(chunks), "BLOCK": BLOCK}
    _scan_chunks[(rows, chunks)](logits, best, best_at, total, logits.stride(0), vocab, chunks, BLOCK=BLOCK)
    if not batch.is_all_greedy:
        cuts = find_cuts(logits, best, batch)
        mass = torch.empty((rows, chunks), dtype=torch.float64, device=logits.device)
        _weigh_chunks[(rows, chunks)](
            logits, best, batch.temperature, *cuts, mass, logits.stride(0), vocab, chunks, **shapes,
            enable_fp_fusion=False,
        )  # fmt: skip
    _pick[(rows,)](
        logits, best, best_at, total, mass, batch.temperature, batch.seeds, batch.positions, *cuts, tokens, logprobs,
        logits.stride(0), vocab, chunks, IS_GREEDY=batch.is_all_greedy, **shapes, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logprobs


def find_cuts(logits: Tensor, best: Tensor, batch: SamplingBatch) -> tuple[Tensor | None, Tensor | None]:
    """What the filters keep of each row: distances below a float32 [L], and those equal to it up to a column int32 [L].

    ``best`` [L, C] has the largest logits of C parts of each row. None where no row has a filter.
    """
    if batch.top_k is None and batch.top_p is None and batch.min_p is None:
        return None, None
    (rows, vocab), chunks = logits.shape, best.shape[1]
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    limits = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _find_cuts[(rows,)](
        logits, best, batch.temperature, batch.top_k, batch.top_p, batch.min_p, thresholds, limits,
        logits.stride(0), vocab, chunks, NUM_CHUNKS=triton.next_power_of_2(chunks), BLOCK=FILTER_BLOCK,
        RADIX_BITS=RADIX_BITS, num_warps=FILTER_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return thresholds, limits


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
def _distances(logits, row, columns, stride, vocab, largest, temperature):
    """How far below the largest, at that temperature; infinite beyond the row. Ordered as their bits: none is -0.0."""
    values = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
    return 0.0 - tl.div_rn(values - largest, temperature)


@triton.jit
def _is_kept(distances, columns, threshold, limit):
    return (distances < threshold) | ((distances == threshold) & (columns <= limit))


@triton.jit
def _tighten(threshold, limit, farthest, vocab):
    """Cut what is farther away than that, too."""
    return tl.minimum(farthest, threshold), tl.where(farthest < threshold, vocab, limit)


@triton.jit
def _find_cuts(
    logits, best, temperatures, top_ks, top_ps, min_ps, thresholds, limits, stride, vocab, chunks,
    NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, RADIX_BITS: tl.constexpr,
):  # fmt: skip
    """The cut of a row: nothing is cut from one that is greedy or has no token."""
    row = tl.program_id(0).to(tl.int64)
    largest = _row_best(best, row, chunks, NUM_CHUNKS)
    temperature = tl.load(temperatures + row)
    threshold, limit = tl.full((), float("inf"), tl.float32), tl.zeros((), tl.int32) + vocab
    if (temperature > 0) & (largest > float("-inf")):
        if top_ks is not None:
            top_k = tl.load(top_ks + row)
            if (top_k > 0) & (top_k < vocab):
                threshold, limit = _cut(
                    logits, row, stride, vocab, largest, temperature, threshold, limit, top_k.to(tl.float64),
                    False, BLOCK, RADIX_BITS,
                )  # fmt: skip
        if top_ps is not None:
            top_p = tl.load(top_ps + row)
            if top_p < 1:
                threshold, limit = _cut(
                    logits, row, stride, vocab, largest, temperature, threshold, limit, top_p.to(tl.float64),
                    True, BLOCK, RADIX_BITS,
                )  # fmt: skip
        if min_ps is not None:
            threshold, limit = _tighten(threshold, limit, -tl.log(tl.load(min_ps + row)), vocab)
    tl.store(thresholds + row, threshold)
    tl.store(limits + row, limit)


@triton.jit
def _cut(
    logits, row, stride, vocab, largest, temperature, threshold, limit, target,
    IS_SHARE: tl.constexpr, BLOCK: tl.constexpr, RADIX_BITS: tl.constexpr,
):  # fmt: skip
    """Of what a cut keeps, nearest first and equals by column, keep all before which less than ``target`` lies.

    That is a number of tokens, or a share of the probability. Radix selection: a pass over the row sums, for each next
    digit of a distance that begins with the digits already known, what has it: column by column, then all columns in
    one order. It ends with the digit that one token alone can have, or else equals are told apart by column.
    """
    RADIX: tl.constexpr = 1 << RADIX_BITS
    FIRST_SHIFT: tl.constexpr = 30 // RADIX_BITS * RADIX_BITS
    digits, offsets = tl.arange(0, RADIX), tl.arange(0, BLOCK)
    known, before, farthest = tl.zeros((), tl.int32), tl.zeros((), tl.float64), tl.zeros((), tl.float32)
    shift, is_alone = tl.zeros((), tl.int32) + FIRST_SHIFT, tl.zeros((), tl.int1)
    while (shift >= 0) & (not is_alone):
        sums = tl.zeros([RADIX, BLOCK], tl.float64 if IS_SHARE else tl.int32)
        for start in range(0, vocab, BLOCK):
            columns = start + offsets
            distances = _distances(logits, row, columns, stride, vocab, largest, temperature)
            weights = tl.where(_is_kept(distances, columns, threshold, limit), _weigh(distances, IS_SHARE), 0)
            digit = (distances.to(tl.int32, bitcast=True) >> shift) - known * RADIX
            sums += tl.where(digits[:, None] == digit[None, :], weights[None, :], 0)
        masses = tl.sum(sums, 1).to(tl.float64)
        if IS_SHARE:  # the first token, which weighs 1, always stays
            target = tl.where(shift == FIRST_SHIFT, tl.maximum(target * tl.sum(masses, 0), 0.5), target)
        nearer = before + tl.cumsum(masses, 0) - masses
        digit = tl.max(tl.where((nearer < target) & (masses > 0), digits, 0), 0)
        before += tl.sum(tl.where(digits < digit, masses, 0.0), 0)
        known = known * RADIX + digit
        farthest = (((known + 1) << shift) - 1).to(tl.float32, bitcast=True)
        is_alone = tl.sum(tl.where(digits == digit, masses, 0.0), 0) < 2 * _weigh(farthest, IS_SHARE)
        shift -= RADIX_BITS
    if is_alone:
        threshold, limit = _tighten(threshold, limit, farthest, vocab)
    else:
        room = tl.minimum(tl.ceil((target - before) / _weigh(farthest, IS_SHARE)), vocab).to(tl.int32)
        num_seen, last = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        for start in range(0, vocab, BLOCK):
            columns = start + offsets
            distances = _distances(logits, row, columns, stride, vocab, largest, temperature)
            is_equal = (distances == farthest) & _is_kept(distances, columns, threshold, limit)
            ranks = num_seen + tl.cumsum(is_equal.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(is_equal & (ranks <= room), columns, 0), 0))
            num_seen = tl.max(ranks, 0)
        threshold, limit = farthest, last
    return threshold, limit


@triton.jit
def _weigh(distances, IS_SHARE: tl.constexpr):
    """What tokens at such distances count for: nothing where they are not allowed."""
    return tl.exp(-distances.to(tl.float64)) if IS_SHARE else (distances < float("inf")).to(tl.int32)


@triton.jit
def _weights(logits, row, columns, stride, vocab, largest, temperatures, thresholds, limits):
    """Tempered, filtered exponentials of a chunk, float64; of a greedy row or one without a token, anything finite."""
    temperature = tl.load(temperatures + row)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    distances = _distances(logits, row, columns, stride, vocab, largest, temperature)
    weights = tl.exp(-distances)
    if thresholds is not None:
        is_kept = _is_kept(distances, columns, tl.load(thresholds + row), tl.load(limits + row))
        weights = tl.where(is_kept, weights, 0.0)
    return weights.to(tl.float64)


@triton.jit
def _weigh_chunks(
    logits, best, temperatures, thresholds, limits, mass, stride, vocab, chunks,
    NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    largest = _row_best(best, row, chunks, NUM_CHUNKS)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    weights = _weights(logits, row, columns, stride, vocab, largest, temperatures, thresholds, limits)
    tl.store(mass + row * chunks + chunk, tl.sum(weights, 0))


@triton.jit
def _pick(
    logits, best, best_at, total, mass, temperatures, seeds, positions, thresholds, limits, tokens, logprobs,
    stride, vocab, chunks, IS_GREEDY: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
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
            weights = _weights(logits, row, columns, stride, vocab, largest, temperatures, thresholds, limits)
            is_past = (before + tl.cumsum(weights, 0) > point) & (weights > 0)
            last_column = tl.max(tl.where(weights > 0, columns, 0), 0)
            token = tl.min(tl.where(is_past, columns, last_column), 0)
    token = tl.where(is_dead, 0, token)
    chosen = tl.load(logits + row * stride + token)
    tl.store(tokens + row, tl.where(is_dead, -1, token))
    tl.store(logprobs + row, tl.where(is_dead, float("-inf"), chosen - largest - tl.log(normalizer)))
