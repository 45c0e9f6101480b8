"""The reference operations against the plainest formula there is, written out here."""

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.api import AttentionBatch
from kernels.reference import Layout, ReferenceKernels, attend, can_prepack, plan_attention
from tests.step_batches import attention_batch, block_tables

KERNELS = ReferenceKernels()
HEADS, GROUPS, HEAD_DIM = 6, 2, 8


def brute_force_attention(
    q: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, scale: float, window: int | None
) -> torch.Tensor:
    """One row, one head, one key list at a time, in fp64."""
    block_size = cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for seq, num_rows in enumerate(batch.query_lens):
        for i in range(num_rows):
            row = int(batch.query_starts[seq]) + i
            position = int(batch.positions[row])
            first = 0 if window is None else max(0, position - window + 1)
            table = batch.block_table[seq].tolist()
            places = [(table[at // block_size], at % block_size) for at in range(first, position + 1)]
            for head in range(q.shape[1]):
                group = head // (q.shape[1] // cache.shape[3])
                keys = torch.stack([cache[0, block, offset, group] for block, offset in places]).double()
                values = torch.stack([cache[1, block, offset, group] for block, offset in places]).double()
                out[row, head] = torch.softmax(keys @ q[row, head].double() * scale, 0) @ values
    return out


@st.composite
def attention_cases(draw: st.DrawFn) -> tuple[AttentionBatch, int, int | None, int]:
    """Decodes then longer sequences, with any shared prefix, over shuffled blocks."""
    block_size = draw(st.sampled_from([1, 3, 4]))
    num_decodes, num_prefills = draw(st.integers(0, 9)), draw(st.integers(0, 3))
    if num_decodes + num_prefills == 0:
        num_decodes = 1
    query_lens = [1] * num_decodes + [draw(st.integers(2, 9)) for _ in range(num_prefills)]
    starts = [draw(st.integers(0, 40)) for _ in query_lens]
    seed = draw(st.integers(0, 10_000))
    tables = block_tables([a + b for a, b in zip(starts, query_lens, strict=True)], seed=seed, block_size=block_size)
    for index in range(1, num_decodes):  # blocks that come before the row's own may be shared with the first sequence
        num_shared = min(draw(st.integers(0, 6)), starts[index] // block_size, starts[0] // block_size)
        tables[index][:num_shared] = tables[0][:num_shared]
    window = draw(st.sampled_from([None, None, 1, 5, 16]))
    return attention_batch(starts, query_lens, tables, block_size), block_size, window, seed


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


def test_a_shared_prefix_is_gathered_once() -> None:
    tables = block_tables([24] * 8)
    tables = [[*tables[0][:3], *table[3:]] for table in tables]
    plan = plan_attention(attention_batch([20] * 8, [1] * 8, tables), Layout(4, torch.float32, None))
    (group,) = plan.decodes
    assert group.shared_blocks.tolist() == tables[0][:3]
    assert group.own_blocks.shape == (8, 3)


def test_one_long_sequence_does_not_pad_the_short_ones() -> None:
    lens = [8] * 6 + [400]
    plan = plan_attention(
        attention_batch([n - 1 for n in lens], [1] * 7, block_tables(lens)), Layout(4, torch.float32, None)
    )
    assert sum(group.own_blocks.numel() for group in plan.decodes) == 6 * 2 + 100


def test_garbage_beyond_a_sequence_and_in_block_zero_is_not_read() -> None:
    batch = attention_batch([5, 2], [1, 3], [[3, 1], [2, 4]])
    cache = torch.randn(2, 5, 4, GROUPS, HEAD_DIM)
    q = torch.randn(4, HEADS, HEAD_DIM)
    before = KERNELS.attention(q, cache, batch, scale=0.3)
    cache[:, 0] = 1e4
    cache[:, 1, 2:] = 1e4
    cache[:, 4, 1:] = 1e4
    assert torch.equal(KERNELS.attention(q, cache, batch, scale=0.3), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_returns_output_and_log_sum_exp(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, GROUPS, n, HEAD_DIM).to(dtype) for n in (3, 11, 11))
    mask = torch.zeros(2, 1, 1, 11, dtype=dtype)
    mask[1, ..., 7:] = -torch.inf
    out, lse = attend(q, k, v, mask, 0.5)
    scores = q.double() @ k.double().transpose(-1, -2) * 0.5 + mask.double()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 33])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_equals_the_matrix_product(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    kernels = ReferenceKernels(torch.device("cpu"), dtype)
    weight, bias = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype) if has_bias else None
    x = torch.randn(num_rows, 50).to(dtype)[:, 5:45]  # rows of a wider tensor
    got = kernels.linear(x, kernels.pack_weight(weight, bias))
    wanted = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


def test_prepacking_is_declined_for_dtypes_that_onednn_does_not_pack() -> None:
    assert not can_prepack(torch.float64)
    assert not ReferenceKernels(torch.device("cpu"), torch.float64).pack_weight(torch.eye(4).double()).is_prepacked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_computed_in_fp32(dtype: torch.dtype) -> None:
    x, residual, weight = (
        torch.randn(5, 3, 32).to(dtype) * 9,
        torch.randn(5, 3, 32).to(dtype),
        torch.randn(32).to(dtype),
    )

    def formula(value: torch.Tensor) -> torch.Tensor:
        wide = value.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5).double(), formula(x), atol=tolerance, rtol=tolerance)
    total = x + residual
    normed, kept = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(normed.double(), formula(total), atol=tolerance, rtol=tolerance)


def test_rotary_turns_pairs_of_halves_by_their_angles() -> None:
    positions, frequencies = torch.tensor([0, 1, 7]), torch.tensor([1.0, 0.5, 0.25, 0.125])
    angles = positions[:, None] * frequencies
    q, k = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
    rotated = KERNELS.rotary(q, k, *(torch.cat((f, f), -1) for f in (angles.cos(), angles.sin())))
    for before, after in zip((q, k), rotated, strict=True):
        turned = torch.complex(before[..., :4], before[..., 4:]) * torch.polar(torch.ones(3, 4), angles)[:, None]
        torch.testing.assert_close(after, torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=1e-5)


def test_silu_mul_multiplies_the_halves() -> None:
    gate, up = torch.randn(4, 10), torch.randn(4, 10)
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(KERNELS.silu_mul(torch.cat((gate, up), -1)), wanted)


def test_write_kv_stores_rows_at_their_slots_and_nothing_else() -> None:
    cache = torch.zeros(2, 4, 3, GROUPS, HEAD_DIM)
    k, v = torch.randn(2, GROUPS, HEAD_DIM), torch.randn(2, GROUPS, HEAD_DIM)
    KERNELS.write_kv(cache, torch.tensor([10, 4]), k, v)
    assert torch.equal(cache[0, 3, 1], k[0])
    assert torch.equal(cache[1, 1, 1], v[1])
    assert int((cache != 0).any(-1).any(-1).sum()) == 4


@pytest.mark.parametrize("vocab_size", [32, 64, 77, 320])
@pytest.mark.parametrize("density", [0.0, 0.01, 0.5, 1.0])
def test_a_bitmask_forbids_exactly_the_zero_bits(vocab_size: int, density: float) -> None:
    rng = random.Random(vocab_size)
    allowed = [[rng.random() < density for _ in range(vocab_size)] for _ in range(3)]
    words = torch.zeros(3, -(-vocab_size // 32), dtype=torch.int64)
    for row in range(3):
        for token in range(vocab_size):
            words[row, token // 32] |= int(allowed[row][token]) << (token % 32)
    rows = torch.tensor([2, 0, 1, 2, 2], dtype=torch.int32)
    logits = torch.randn(len(rows), vocab_size)
    wanted = logits.masked_fill(~torch.tensor(allowed)[rows], -torch.inf)
    KERNELS.apply_token_bitmask(logits, words.to(torch.int32), rows)
    assert torch.equal(logits, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_gives_what_the_cpu_gives() -> None:
    starts, query_lens = [30, 17, 22, 9, 5, 0], [1, 1, 1, 1, 6, 9]
    tables = block_tables([a + b for a, b in zip(starts, query_lens, strict=True)])
    batch = attention_batch(starts, query_lens, tables)
    cache = torch.randn(2, 64, 4, GROUPS, HEAD_DIM)
    q = torch.randn(len(batch.positions), HEADS, HEAD_DIM)
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in moved.items()}
    for window in (None, 7):
        wanted = KERNELS.attention(q, cache, batch, scale=0.3, window=window)
        got = ReferenceKernels(torch.device("cuda")).attention(
            q.cuda(), cache.cuda(), AttentionBatch(**moved), scale=0.3, window=window
        )
        torch.testing.assert_close(got.cpu(), wanted, atol=1e-4, rtol=1e-4)
    words = torch.randint(-(2**31), 2**31 - 1, (3, 10), dtype=torch.int32)
    rows = torch.tensor([1, 2, 1], dtype=torch.int32)
    logits = torch.randn(3, 320)
    on_gpu = logits.cuda()
    KERNELS.apply_token_bitmask(on_gpu, words.cuda(), rows.cuda())
    KERNELS.apply_token_bitmask(logits, words, rows)
    assert torch.equal(on_gpu.cpu(), logits)
