"""Latent attention against its definition, written out with keys and values of every head at every position."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.api import AttentionBatch
from kernels.reference import ReferenceKernels
from kernels.reference_mla import is_absorbing_cheaper, split_up_projection
from tests.step_batches import attention_batch, block_tables

KERNELS = ReferenceKernels()
HEADS, KEY, ROPE, VALUE, RANK = 3, 6, 4, 5, 12


def brute_force(
    q: torch.Tensor,
    q_rope: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    weight: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """One row at a time in fp64, over the latents of its own position and those before it."""
    block_size, up = cache.shape[1], weight.double().view(HEADS, KEY + VALUE, RANK)
    out = torch.zeros(len(q), HEADS, VALUE, dtype=torch.float64)
    row = 0
    for seq, num_rows in enumerate(batch.query_lens):
        table = batch.block_table[seq].tolist()
        for _ in range(num_rows):
            places = range(int(batch.positions[row]) + 1)
            slots = [table[at // block_size] * block_size + at % block_size for at in places]
            latents = cache.flatten(0, 2)[slots].double()
            both = torch.einsum("tr,hsr->hts", latents[:, :RANK], up)
            scores = torch.einsum("hts,hs->ht", both[..., :KEY], q[row].double())
            scores += torch.einsum("ts,hs->ht", latents[:, RANK:], q_rope[row].double())
            out[row] = torch.einsum("ht,hts->hs", torch.softmax(scores * scale, 1), both[..., KEY:])
            row += 1
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[AttentionBatch, int, int]:
    """Decodes, some sharing a prefix, then chunks short enough to absorb and long enough to expand."""
    block_size, seed = draw(st.sampled_from([1, 3, 64])), draw(st.integers(0, 10_000))
    num_decodes = draw(st.integers(0, 6))
    query_lens = [1] * num_decodes + draw(st.lists(st.integers(2, 24), max_size=2, min_size=0 if num_decodes else 1))
    starts = [draw(st.integers(0, 20)) for _ in query_lens]
    tables = block_tables([a + b for a, b in zip(starts, query_lens, strict=True)], seed=seed, block_size=block_size)
    for index in range(1, num_decodes):
        num_shared = min(starts[index] // block_size, starts[0] // block_size)
        tables[index][:num_shared] = tables[0][:num_shared]
    return attention_batch(starts, query_lens, tables, block_size), block_size, seed


@settings(max_examples=40, deadline=None)
@given(cases())
def test_latent_attention_equals_its_definition_for_any_batch(case: tuple[AttentionBatch, int, int]) -> None:
    batch, block_size, seed = case
    generator = torch.Generator().manual_seed(seed)
    num_blocks, num_rows = int(batch.block_table.max()) + 1, len(batch.positions)
    cache = torch.randn(num_blocks, block_size, 1, RANK + ROPE, generator=generator)
    q, q_rope = (torch.randn(num_rows, HEADS, size, generator=generator) for size in (KEY, ROPE))
    weight = torch.randn(HEADS * (KEY + VALUE), RANK, generator=generator)
    up = KERNELS.pack_up_projection(weight, HEADS, KEY)
    got = KERNELS.latent_attention(q, q_rope, cache, batch, up, scale=0.3)
    torch.testing.assert_close(got.double(), brute_force(q, q_rope, cache, batch, weight, 0.3), atol=1e-4, rtol=1e-4)


def test_both_forms_of_a_chunk_are_reached_by_the_cases_above() -> None:
    up = split_up_projection(torch.zeros(HEADS * (KEY + VALUE), RANK), HEADS, KEY)
    assert is_absorbing_cheaper(2, up)
    assert not is_absorbing_cheaper(24, up)


@pytest.mark.parametrize(("num_rows", "is_cheaper"), [(1, True), (170, True), (171, False), (8192, False)])
def test_deepseek_absorbs_up_to_170_rows(num_rows: int, is_cheaper: bool) -> None:
    up = split_up_projection(torch.empty(256, 512, device="meta"), 1, 128)
    assert is_absorbing_cheaper(num_rows, up) == is_cheaper


def test_latents_are_written_to_their_slots_only() -> None:
    cache = torch.zeros(3, 4, 1, RANK + ROPE)
    latent, rope = torch.randn(2, RANK), torch.randn(2, ROPE)
    KERNELS.write_latent(cache, torch.tensor([5, 11]), latent, rope)
    assert torch.equal(cache[1, 1, 0], torch.cat((latent[0], rope[0])))
    assert torch.equal(cache[2, 3, 0], torch.cat((latent[1], rope[1])))
    assert cache.count_nonzero() == 2 * (RANK + ROPE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_device_gives_what_the_cpu_gives() -> None:
    starts, query_lens = [30, 17, 22, 9, 5, 0], [1, 1, 1, 1, 6, 30]
    tables = block_tables([a + b for a, b in zip(starts, query_lens, strict=True)])
    batch = attention_batch(starts, query_lens, tables)
    moved = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in moved.items()}
    cache, weight = torch.randn(64, 4, 1, RANK + ROPE), torch.randn(HEADS * (KEY + VALUE), RANK)
    q, q_rope = torch.randn(len(batch.positions), HEADS, KEY), torch.randn(len(batch.positions), HEADS, ROPE)
    up = KERNELS.pack_up_projection(weight, HEADS, KEY)
    wanted = KERNELS.latent_attention(q, q_rope, cache, batch, up, scale=0.3)
    kernels = ReferenceKernels(torch.device("cuda"))
    up = kernels.pack_up_projection(weight.cuda(), HEADS, KEY)
    got = kernels.latent_attention(q.cuda(), q_rope.cuda(), cache.cuda(), AttentionBatch(**moved), up, scale=0.3)
    torch.testing.assert_close(got.cpu(), wanted, atol=1e-4, rtol=1e-4)
