"""The batch-invariant operations: still what the reference computes, and the same bits wherever a row lies."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from kernels.api import AttentionBatch, Gate, SamplingBatch, Scoring
from kernels.invariant import KEY_SPLIT, ROW_TILE, InvariantKernels, by_lanes
from kernels.reference import ReferenceKernels
from tests.kernels.test_reference import GROUPS, HEAD_DIM, HEADS, attention_cases, brute_force_attention
from tests.step_batches import attention_batch, block_tables

CPU = torch.device("cpu")
KERNELS = InvariantKernels(CPU)


@settings(max_examples=60, deadline=None)
@given(attention_cases())
def test_attention_equals_brute_force_for_any_batch(case: tuple[AttentionBatch, int, int | None, int]) -> None:
    batch, block_size, window, seed = case
    generator = torch.Generator().manual_seed(seed)
    num_blocks = int(batch.block_table.max()) + 1
    cache = torch.randn(2, num_blocks, block_size, GROUPS, HEAD_DIM, generator=generator)
    q = torch.randn(len(batch.positions), HEADS, HEAD_DIM, generator=generator)
    got = KERNELS.attention(q, cache, batch, scale=0.3, window=window)
    torch.testing.assert_close(got.double(), brute_force_attention(q, cache, batch, 0.3, window), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [None, KEY_SPLIT + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_attends_alike_alone_and_beside_longer_sequences(dtype: torch.dtype, window: int | None) -> None:
    kernels, num_keys = InvariantKernels(CPU, dtype), 3 * KEY_SPLIT + 5
    tables = block_tables([num_keys, 6 * KEY_SPLIT, 3])
    cache = torch.randn(2, 200, 4, GROUPS, HEAD_DIM).to(dtype)
    q = torch.randn(num_keys, HEADS, HEAD_DIM).to(dtype)
    whole = attention_batch([0], [num_keys], tables[:1])
    wanted = kernels.attention(q, cache, whole, scale=0.3, window=window)
    for first in (0, 1, KEY_SPLIT - 1, KEY_SPLIT, num_keys - 1):
        batch = attention_batch([6 * KEY_SPLIT - 1, first, 0], [1, 1, 3], [tables[1], tables[0], tables[2]])
        others = torch.randn(5, HEADS, HEAD_DIM).to(dtype)
        others[1] = q[first]
        assert torch.equal(kernels.attention(others, cache, batch, scale=0.3, window=window)[1], wanted[first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("depth", "width"), [(33, 50), (576, 96), (1536, 576)])
def test_a_row_is_projected_alike_among_any_number_of_rows(depth: int, width: int, dtype: torch.dtype) -> None:
    kernels = InvariantKernels(CPU, dtype)
    packed = kernels.pack_weight(torch.randn(width, depth).to(dtype), torch.randn(width).to(dtype))
    x = torch.randn(100, depth).to(dtype)
    wanted = kernels.linear(x, packed)
    torch.testing.assert_close(wanted, ReferenceKernels(CPU, dtype).linear(x, packed), atol=0.2, rtol=0.02)
    for first, end in ((0, 1), (17, 18), (3, 3 + ROW_TILE), (50, 87), (9, 9)):
        assert torch.equal(kernels.linear(x[first:end], packed), wanted[first:end])


@pytest.mark.parametrize("function", [functional.silu, torch.sigmoid, functional.softplus])
def test_an_elementwise_function_rounds_alike_wherever_a_value_lies(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(40_000) * 5
    wanted = by_lanes(function, x)
    torch.testing.assert_close(wanted, function(x))
    assert torch.equal(torch.cat([by_lanes(function, part) for part in x.split(7)]), wanted)


@pytest.mark.parametrize("scoring", Scoring)
def test_experts_are_picked_and_computed_as_by_the_reference_and_alike_in_any_batch(scoring: Scoring) -> None:
    gate = Gate(scoring, num_selected=3, num_groups=2, num_groups_selected=1, is_normalized=True, scale=2.5)
    logits, x = torch.randn(50, 10), torch.randn(50, 24)
    gate_up, down = torch.randn(10, 40, 24), torch.randn(10, 24, 20)
    results = []
    for kernels in (KERNELS, ReferenceKernels(CPU)):
        weights, experts = kernels.route(logits, gate)
        results.append(kernels.experts_mlp(x, weights, experts, kernels.pack_experts(gate_up, down)))
    torch.testing.assert_close(*results, atol=1e-3, rtol=1e-4)
    for row in (0, 31, 49):
        weights, experts = KERNELS.route(logits[row : row + 1], gate)
        alone = KERNELS.experts_mlp(x[row : row + 1], weights, experts, KERNELS.pack_experts(gate_up, down))
        assert torch.equal(alone[0], results[0][row])


def test_rows_are_drawn_as_by_the_reference() -> None:
    logits = torch.randn(9, 77)
    batch = SamplingBatch(torch.linspace(0, 2, 9), torch.arange(9), torch.arange(9), top_k=torch.arange(9))
    tokens, logprobs = KERNELS.sample(logits, batch)
    expected = ReferenceKernels(CPU).sample(logits, batch)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logprobs, expected[1])
