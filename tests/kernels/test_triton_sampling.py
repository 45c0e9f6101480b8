"""Masks and draws in Triton against the reference: on a GPU where there is one, otherwise in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from kernels import sampling
from kernels.api import SamplingBatch
from kernels.reference import ReferenceKernels

pytest.importorskip("triton", reason="triton is not installed")

from kernels import triton_sampling

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf arithmetic in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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


@pytest.mark.parametrize("min_p", [None, 0.2])
def test_draws_equal_the_reference_for_mixed_temperatures(min_p: float | None) -> None:
    rows, vocab = 24, 5001
    logits = 3 * draw(rows, vocab, seed=12)
    logits[:, 100:4000] = -torch.inf
    logits[5] = -torch.inf
    index = torch.arange(rows, device=DEVICE)
    batch = SamplingBatch(
        temperature=(index % 4).float() * 0.5,
        seeds=index * 7919,
        positions=index % 3,
        min_p=None if min_p is None else torch.full((rows,), min_p, device=DEVICE) * (index % 2),
    )
    tokens, logprobs = triton_sampling.sample(logits.clone(), batch)
    wanted_tokens, wanted_logprobs = sampling.sample(logits.clone(), batch)
    assert tokens.tolist() == wanted_tokens.tolist()
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-5, atol=1e-5)
