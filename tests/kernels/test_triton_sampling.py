"""Masks and draws in Triton against the reference: on a GPU where there is one, otherwise in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import sampling
from kernels.api import SamplingBatch
from kernels.reference import ReferenceKernels
from tests.kernels.test_sampling import kept_oracle

pytest.importorskip("triton", reason="triton is not installed")

from kernels import triton_sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf arithmetic in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 151_936 if torch.cuda.is_available() else 5001


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_the_mask_bans_exactly_the_zero_bits() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3, 157), dtype=torch.int32, device=DEVICE)
    logits = draw(3, 5000, seed=10)
    rows = torch.tensor([2, 0, 2], dtype=torch.int32, device=DEVICE)
    expected = logits.clone()
    triton_sampling.apply_token_bitmask(logits, words, rows)
    ReferenceKernels(DEVICE).apply_token_bitmask(expected, words, rows)
    assert torch.equal(logits, expected)


def test_greedy_takes_the_first_of_the_largest_and_marks_dead_rows() -> None:
    logits = draw(5, 9001, seed=11)
    logits[1, [17, 4000, 8999]] = 50.0
    logits[2] = -torch.inf
    logits[3, :9000] = -torch.inf
    zeros = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    batch = SamplingBatch(zeros.float(), zeros, zeros, is_all_greedy=True)
    tokens, logprobs = triton_sampling.sample(logits.clone(), batch)
    wanted_tokens, wanted_logprobs = ReferenceKernels(DEVICE).sample(logits.clone(), batch)
    assert tokens.tolist() == wanted_tokens.tolist()
    assert tokens[1] == 17
    assert tokens[2] == -1
    assert tokens[3] == 9000
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "filters",
    [{}, {"min_p": 0.2}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 3000, "top_p": 0.8, "min_p": 0.01}],
    ids=lambda filters: "-".join(filters) or "none",
)
def test_draws_equal_the_reference_for_mixed_rows(filters: dict[str, float]) -> None:
    rows = 12
    logits = 3 * draw(rows, VOCAB, seed=12)
    logits[:, 100:4000] = -torch.inf
    logits[5] = -torch.inf
    logits[7] = 1.0
    index = torch.arange(rows, device=DEVICE)
    off = {"top_k": torch.tensor(0), "top_p": torch.tensor(1.0), "min_p": torch.tensor(0.0)}
    batch = SamplingBatch(
        temperature=(index % 4).float() * 0.5,
        seeds=index * 7919,
        positions=index % 3,
        **{name: torch.where(index % 5 > 0, value, off[name].to(DEVICE)) for name, value in filters.items()},
    )
    tokens, logprobs = triton_sampling.sample(logits.clone(), batch)
    wanted_tokens, wanted_logprobs = sampling.sample(logits.clone(), batch)
    assert tokens.tolist() == wanted_tokens.tolist()
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-5, atol=1e-5)


@st.composite
def filtered_rows(draw: st.DrawFn) -> tuple[Tensor, SamplingBatch]:
    """Rows with many equal logits or few, some of them masked, on a grid: dividing by a temperature rounds nothing."""
    rows, vocab = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 40, 1023, 1024, 1025, 2050]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread, grid = draw(st.sampled_from([0, 0.01, 1, 4, 12])), draw(st.sampled_from([1, 2**12]))
    logits = np.round(random.normal(size=(rows, vocab)) * spread * grid) / grid
    logits[random.random(logits.shape) < draw(st.sampled_from([0, 0.3, 0.98]))] = -np.inf

    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array([draw(values) for _ in range(rows)])

    parameters = {
        "temperature": column(st.sampled_from([0.0, 0.25, 1.0, 4.0])).astype(np.float32),
        "seeds": random.integers(-(2**63), 2**63, rows),
        "positions": random.integers(0, 100, rows),
        "top_k": column(st.integers(0, 5) | st.integers(0, vocab + 3)),
        "top_p": column(st.floats(0.0, 1.0, width=32) | st.sampled_from([0.0, 0.999, 1.0])).astype(np.float32),
        "min_p": column(st.sampled_from([0.0, 1e-6, 0.03])).astype(np.float32),
    }
    for name in draw(st.sets(st.sampled_from(["top_k", "top_p", "min_p"]))):
        del parameters[name]
    tensors = {name: torch.from_numpy(values).to(DEVICE) for name, values in parameters.items()}
    return torch.from_numpy(logits).float().to(DEVICE), SamplingBatch(**tensors)


@settings(max_examples=60 if torch.cuda.is_available() else 30, deadline=None)
@given(filtered_rows())
def test_filters_keep_what_sorting_would_equals_by_index(case: tuple[Tensor, SamplingBatch]) -> None:
    logits, batch = case
    rows, vocab = logits.shape
    cuts = triton_sampling.find_cuts(logits, logits.amax(dim=1, keepdim=True), batch)
    for row in range(rows):
        temperature, top_k, top_p, min_p = (
            default if values is None else values[row].item()
            for values, default in ((batch.temperature, 0), (batch.top_k, 0), (batch.top_p, 1), (batch.min_p, 0))
        )
        values = logits[row].double().cpu().numpy()
        if cuts[0] is None or temperature == 0 or values.max() == -math.inf:
            continue
        assume(is_clear(values / temperature, int(top_k), top_p))
        wanted = kept_oracle(values, temperature, int(top_k), max(top_p, 1e-9), min_p) > 0
        threshold, limit = (part[row].item() for part in cuts)
        distances = (values.max() - values) / temperature
        kept = (distances < threshold) | ((distances == threshold) & (np.arange(vocab) <= limit))
        assert (kept & (values > -math.inf)).nonzero()[0].tolist() == wanted.nonzero()[0].tolist()
    assert triton_sampling.sample(logits, batch)[0].tolist() == sampling.sample(logits.clone(), batch)[0].tolist()


def is_clear(scaled: np.ndarray, top_k: int, top_p: float) -> bool:
    """Whether no token lies where rounding would decide if it is among the first ``top_p``."""
    weights = np.sort(np.exp(scaled - scaled.max()))[::-1][: top_k or None].cumsum()
    return top_p == 1 or bool(np.abs(weights / weights[-1] - top_p).min() > 1e-9)
