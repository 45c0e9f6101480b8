"""Draw tokens from logits in plain torch; random numbers are a hash, so neither state nor neighbours influence a row.

``sample`` is the specification of every backend's sampler. Knows nothing of grammars: masked tokens are -inf.
"""

import torch
from torch import Tensor

from kernels.api import SamplingBatch

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64's increment, as a signed number
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
NUM_PURPOSES = 3
"""Random numbers a position can need: 0 draws the token; 1 and 2 are kept for residual draws and draft acceptance."""

SCAN_WIDTH = 64
"""Logits reduced to their maximum, which vectorises, before the position is looked for."""

FIRST_CANDIDATES = 256
"""Largest logits looked at first for top-p; sorting a whole vocabulary costs milliseconds a row on a CPU."""

LEAST_EXPONENT, LEAST_POWER = -87.0, 1.65e-38
"""Below, a power is no normal float32: nobody draws it, and a CPU takes 4 times as long for infinity, 25 for others."""


def uniform(seeds: Tensor, positions: Tensor, purpose: int = 0) -> Tensor:
    """Hash int64 seeds and positions to float64 in [0, 1).

    u = (mix(mix(seed) + (3 * position + purpose + 1) * 0x9E3779B97F4A7C15) >> 11) * 2^-53 modulo 2^64, where mix is the
    finaliser of splitmix64 (Steele, Lea and Flood 2014). int64 arithmetic wraps, so it equals the unsigned one.
    """
    counter = (positions * NUM_PURPOSES + purpose + 1) * GOLDEN
    return _shift_right(_mix(_mix(seeds) + counter), 11).double() * 2.0**-53


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Draw one token per row; kernels.api.Kernels.sample is the specification."""
    tokens = first_argmax(logits)
    best = logits.gather(1, tokens[:, None])[:, 0]
    if not batch.is_all_greedy:
        rows = batch.temperature.nonzero()[:, 0]
        tokens[rows] = _draw(logits[rows], best[rows], _select_rows(batch, rows))
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    total = _powers(logits - best[:, None]).sum(dim=-1)
    has_token = best > -torch.inf
    logprobs = torch.where(has_token, chosen - best - total.log(), -torch.inf)
    return torch.where(has_token, tokens, -1), logprobs


def _powers(exponents: Tensor) -> Tensor:
    """e to the power of each, in place; 0 where that is next to nothing."""
    return torch.threshold_(exponents.clamp_(min=LEAST_EXPONENT).exp_(), LEAST_POWER, 0.0)


def first_argmax(logits: Tensor) -> Tensor:
    """Lowest index of the largest logit of each row of [L, V]: int64 [L]; 7 times faster than argmax on a CPU."""
    if logits.device.type != "cpu" or logits.shape[1] % SCAN_WIDTH:
        return logits.argmax(dim=-1)  # the first of equals, too
    runs = logits.unflatten(1, (-1, SCAN_WIDTH))
    run = runs.amax(dim=-1).argmax(dim=-1, keepdim=True)
    return (run * SCAN_WIDTH)[:, 0] + runs.take_along_dim(run[..., None], dim=1)[:, 0].argmax(dim=-1)


def _select_rows(batch: SamplingBatch, rows: Tensor) -> SamplingBatch:
    return SamplingBatch(
        temperature=batch.temperature[rows],
        seeds=batch.seeds[rows],
        positions=batch.positions[rows],
        top_k=None if batch.top_k is None else batch.top_k[rows],
        top_p=None if batch.top_p is None else batch.top_p[rows],
        min_p=None if batch.min_p is None else batch.min_p[rows],
    )


def _draw(logits: Tensor, best: Tensor, batch: SamplingBatch) -> Tensor:
    """Tokens of rows that are not greedy: filters, then the first index at which the CDF exceeds u * total."""
    scaled = (logits - best[:, None]).div_(batch.temperature[:, None])  # largest is 0; NaN in rows without a token
    if batch.top_k is not None:
        limits = torch.where(batch.top_k > 0, batch.top_k, scaled.shape[1]).clamp(max=scaled.shape[1])
        scaled = _keep_largest(scaled, limits)
    if batch.top_p is not None:
        scaled = _keep_largest(scaled, _nucleus_sizes(scaled, batch.top_p))
    if batch.min_p is not None:
        scaled = scaled.masked_fill(scaled < batch.min_p.log()[:, None], -torch.inf)
    cdf = _powers(scaled).cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1]
    point = torch.minimum(
        uniform(batch.seeds, batch.positions) * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(cdf, point[:, None], right=True)[:, 0].clamp(max=scaled.shape[1] - 1)


def _keep_largest(scaled: Tensor, counts: Tensor) -> Tensor:
    """Set all but the ``counts[l]`` largest of row l to -inf; among equals the lowest indices stay."""
    is_cut = counts < scaled.shape[1]
    if not bool(is_cut.any()):
        return scaled
    num_candidates = int(counts[is_cut].max())
    largest = scaled.topk(num_candidates, dim=-1).values
    threshold = largest.gather(1, counts.clamp(max=num_candidates)[:, None] - 1)
    is_above, is_equal = scaled > threshold, scaled == threshold
    room = counts[:, None] - is_above.sum(dim=-1, keepdim=True)
    is_kept = is_above | (is_equal & (is_equal.cumsum(dim=-1) <= room)) | ~is_cut[:, None]
    return scaled.masked_fill(~is_kept, -torch.inf)


def _nucleus_sizes(scaled: Tensor, top_p: Tensor) -> Tensor:
    """How many of the largest tokens each row needs for a probability of at least ``top_p``; all where it is 1."""
    vocab_size = scaled.shape[1]
    total = _powers(scaled.double()).sum(dim=-1, keepdim=True)
    num_candidates = min(FIRST_CANDIDATES, vocab_size)
    while True:
        largest = _powers(scaled.topk(num_candidates, dim=-1).values.double()).div_(total)
        before = largest.cumsum(dim=-1) - largest
        sizes = (before < top_p.double()[:, None]).sum(dim=-1)
        is_short = (sizes == num_candidates) & (top_p < 1)
        if num_candidates == vocab_size or not bool(is_short.any()):
            return torch.where(top_p < 1, sizes.clamp(min=1), vocab_size)
        num_candidates = min(num_candidates * 16, vocab_size)


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> on int64 copies the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
