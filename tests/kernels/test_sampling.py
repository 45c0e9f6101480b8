"""Sampling against numpy, and the random numbers against splitmix64 in plain integers."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.api import SamplingBatch
from kernels.sampling import first_argmax, sample, uniform

MASK = 2**64 - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def uniform_oracle(seed: int, position: int, purpose: int = 0) -> float:
    counter = (3 * position + purpose + 1) * 0x9E3779B97F4A7C15
    return (mix((mix(seed & MASK) + counter) & MASK) >> 11) * 2.0**-53


def batch(rows: int, *, temperature: float = 1.0, seed: int = 0, **filters: float) -> SamplingBatch:
    kinds = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    return SamplingBatch(
        temperature=torch.full((rows,), temperature),
        seeds=torch.arange(rows) + seed,
        positions=torch.arange(rows) % 7,
        is_all_greedy=temperature == 0,
        **{name: torch.full((rows,), value, dtype=kinds[name]) for name, value in filters.items()},
    )


def kept_oracle(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Probabilities after the filters, in fp64: temperature, top-k, top-p, min-p; ties keep the lowest indices."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    order = np.lexsort((np.arange(len(probs)), -probs))
    if 0 < top_k < len(probs):
        probs[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= top_p * probs.sum()]] = 0
    probs[probs < min_p * probs.max()] = 0
    return probs / probs.sum()


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6), st.integers(0, 2))
def test_random_numbers_are_the_documented_hash(seed: int, position: int, purpose: int) -> None:
    got = uniform(torch.tensor([seed]), torch.tensor([position]), purpose)
    assert got.item() == uniform_oracle(seed, position, purpose)


@pytest.mark.parametrize("axis", ["seeds", "positions"])
def test_random_numbers_are_uniform_and_uncorrelated_along(axis: str) -> None:
    counting, constant = torch.arange(100_000), torch.full((100_000,), 12345)
    u = uniform(counting, constant) if axis == "seeds" else uniform(constant, counting)
    counts = torch.histc(u.float(), bins=100, min=0, max=1).double()
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert 40 < chi_square < 180  # 99 degrees of freedom: outside with probability below 1e-6
    correlation = float(torch.corrcoef(torch.stack((u[:-1], u[1:])))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("vocab_size", [1, 50, 64, 320, 1000])
def test_greedy_takes_the_lowest_index_among_equals(vocab_size: int) -> None:
    logits = torch.randint(-3, 3, (40, vocab_size)).float()
    logits[::4] = -torch.inf
    logits[::4, vocab_size // 2] = -5.0
    wanted = [row.index(max(row)) for row in logits.tolist()]
    assert first_argmax(logits).tolist() == wanted
    assert sample(logits, batch(40, temperature=0))[0].tolist() == wanted


def test_logprobs_are_of_the_masked_logits_at_temperature_one() -> None:
    logits = torch.randn(30, 200)
    logits[:, ::3] = -torch.inf
    for temperature in (0.0, 0.5):
        tokens, logprobs = sample(logits, batch(30, temperature=temperature, top_k=5))
        wanted = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_row_that_allows_no_token_says_so_and_spoils_no_neighbour() -> None:
    logits = torch.randn(6, 64)
    logits[2] = -torch.inf
    for temperature, filters in ((0.0, {}), (1.0, {}), (1.0, {"top_k": 3, "top_p": 0.5, "min_p": 0.1})):
        tokens, logprobs = sample(logits, batch(6, temperature=temperature, **filters))
        assert tokens[2] == -1
        assert logprobs[2] == -torch.inf
        alone, _ = sample(logits[3:], _rows(batch(6, temperature=temperature, **filters), slice(3, 6)))
        assert tokens[3:].tolist() == alone.tolist()


def _rows(whole: SamplingBatch, rows: slice) -> SamplingBatch:
    filters = {name: getattr(whole, name) for name in ("temperature", "seeds", "positions", "top_k", "top_p", "min_p")}
    taken = {name: None if value is None else value[rows] for name, value in filters.items()}
    return SamplingBatch(**taken, is_all_greedy=whole.is_all_greedy)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 3, 40, 1000]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.05, 0.5]),
    st.booleans(),
)
def test_filters_and_draw_equal_numpys(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, has_ties: bool
) -> None:
    logits = torch.randn(5, 320, generator=torch.Generator().manual_seed(seed)) * 3
    if has_ties:
        logits = logits.round()
    given_batch = batch(5, temperature=temperature, seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens, _ = sample(logits, given_batch)
    for row in range(5):
        probs = kept_oracle(logits[row].numpy(), temperature, top_k, top_p, min_p)
        cdf = np.cumsum(probs)
        u = uniform_oracle(int(given_batch.seeds[row]), int(given_batch.positions[row])) * cdf[-1]
        token = int(tokens[row])
        assert probs[token] > 0
        assert cdf[token] - probs[token] - 1e-5 <= u <= cdf[token] + 1e-5


def test_top_p_finds_a_nucleus_larger_than_the_first_candidates() -> None:
    logits = torch.zeros(1, 8192)  # flat: a nucleus of 0.9 is the first 7,373 of equal tokens
    rows = SamplingBatch(
        torch.ones(400), torch.arange(400), torch.zeros(400, dtype=torch.int64), top_p=torch.full((400,), 0.9)
    )
    tokens, _ = sample(logits.expand(400, -1), rows)
    assert 7200 < int(tokens.max()) < 7374


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    tokens, _ = sample(probs.log().expand(20_000, -1), batch(20_000))
    counts = torch.bincount(tokens, minlength=4)
    chi_square = float(((counts - probs * 20_000) ** 2 / (probs * 20_000)).sum())
    assert chi_square < 30  # 3 degrees of freedom: above with probability below 2e-6


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(12)), st.integers(0, 100))
def test_a_rows_draw_does_not_depend_on_its_neighbours(order: list[int], seed: int) -> None:
    logits = torch.randn(12, 96, generator=torch.Generator().manual_seed(seed)) * 2
    given_batch = SamplingBatch(
        temperature=torch.tensor([0.0, 0.5, 1.0] * 4),
        seeds=torch.arange(12) * 977 + seed,
        positions=torch.arange(12),
        top_k=torch.tensor([0, 5, 20, 1] * 3),
        top_p=torch.tensor([1.0, 0.7] * 6),
        min_p=torch.tensor([0.0, 0.1, 0.02] * 4),
    )
    tokens, logprobs = sample(logits, given_batch)
    index = torch.tensor(order)
    shuffled = SamplingBatch(
        **{n: getattr(given_batch, n)[index] for n in ("temperature", "seeds", "positions", "top_k", "top_p", "min_p")}
    )
    again, logprobs_again = sample(logits[index], shuffled)
    assert torch.equal(again, tokens[index])
    assert torch.equal(logprobs_again, logprobs[index])
    for row in range(0, 12, 5):
        alone, _ = sample(logits[row : row + 1], _rows(given_batch, slice(row, row + 1)))
        assert alone[0] == tokens[row]
