"""Latent attention in Triton against the reference: on a GPU, otherwise in Triton's interpreter."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.api import AttentionBatch
from kernels.reference import ReferenceKernels
from tests.step_batches import attention_batch, block_tables, move_batch

pytest.importorskip("triton", reason="triton is not installed")

from kernels import triton_mla
from kernels.reference_mla import split_up_projection
from kernels.triton_dense import TritonKernels
from tests.kernels.test_triton_dense import DEVICE, DTYPES, HAS_GPU, TOLERANCE, draw, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf arithmetic in the interpreter
LONGEST = 700 if HAS_GPU else 100  # keys and rows of more than one tile


def make_batch(starts: list[int], query_lens: list[int], block_size: int, num_shared: int = 0) -> AttentionBatch:
    """The first ``num_shared`` blocks are the same for all sequences that have so many full ones before their rows."""
    tables = block_tables([a + b for a, b in zip(starts, query_lens, strict=True)], block_size=block_size)
    for start, table in zip(starts, tables, strict=True):
        count = min(num_shared, start // block_size, starts[0] // block_size)
        table[:count] = tables[0][:count]
    batch = attention_batch(starts, query_lens, tables, block_size)
    return dataclasses.replace(move_batch(batch, DEVICE), host_table=batch.block_table.numpy())


SHAPES = [(16, 128, 64, 128, 512), (128, 128, 64, 128, 512)] if HAS_GPU else [(16, 16, 16, 16, 32), (3, 12, 8, 20, 24)]
"""Heads, sizes of a head's key, of the rotated key and of a head's value, rank."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15 if HAS_GPU else 6, deadline=None)
@given(data=st.data())
def test_latent_attention_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], data: st.DataObject) -> None:
    heads, key, rope, value, rank = shape
    block_size = data.draw(st.sampled_from([4, 64]))
    num_decodes = data.draw(st.integers(0, 4))
    query_lens = [1] * num_decodes + data.draw(
        st.lists(st.integers(2, LONGEST // 4), max_size=2, min_size=0 if num_decodes else 1)
    )
    starts = [data.draw(st.integers(0, LONGEST)) for _ in query_lens]
    batch = make_batch(starts, query_lens, block_size, data.draw(st.integers(0, 3)))
    num_rows, num_blocks = sum(query_lens), int(batch.block_table.max()) + 1
    fused = draw(num_rows, heads, key + rope, seed=1)
    cache, weight = draw(num_blocks, block_size, 1, rank + rope, seed=2), draw(heads * (key + value), rank, seed=3)

    def attend(kernels: ReferenceKernels, device: torch.device, kind: torch.dtype) -> torch.Tensor:
        q, q_rope = fused.to(device, kind).split([key, rope], dim=-1)
        up = kernels.pack_up_projection(weight.to(device, kind), heads, key)
        at = move_batch(batch, device)
        return kernels.latent_attention(q, q_rope, cache.to(device, kind), at, up, scale=(key + rope) ** -0.5 / 4)

    got = attend(TritonKernels(DEVICE, dtype), DEVICE, dtype)
    assert not got.isnan().any()
    wanted = attend(ReferenceKernels(), torch.device("cpu"), torch.float32)
    assert relative_error(got.cpu(), wanted) < TOLERANCE[dtype]


def test_a_long_chunk_is_expanded_a_short_one_absorbed_and_what_chunks_share_is_expanded_once() -> None:
    up = split_up_projection(torch.empty(16 * 256, 512, device="meta"), 16, 128)

    def num_expanded(batch: AttentionBatch) -> int:
        expansion = triton_mla.plan_expansion(batch, 64, up, 64)
        return 0 if expansion is None else len(expansion.blocks)

    assert num_expanded(make_batch([640], [20], 64)) == 0
    assert num_expanded(make_batch([0], [640], 64)) == 10
    assert num_expanded(make_batch([640] * 20, [40] * 20, 64)) == 0, "40 rows do not pay for 10 blocks of their own"
    assert num_expanded(make_batch([640] * 20, [40] * 20, 64, num_shared=10)) == 30, "but for those they share"
    assert num_expanded(make_batch([640] * 20, [5] * 20, 64, num_shared=10)) == 0, "5 rows would leave tiles empty"
    assert num_expanded(make_batch([640, 640], [1, 20], 64)) == 0
    no_table = dataclasses.replace(make_batch([0], [640], 64), host_table=None)
    assert num_expanded(no_table) == 0


def test_a_recorded_step_takes_any_runs_and_padding() -> None:
    """Lengths are on the device alone, some sequences have no rows, some rows no sequence."""
    batch = make_batch([9, 30, 0, 300, 70], [1, 5, 3, 1, 20], 4)
    fused, cache = draw(33, 16, 32, seed=7), draw(200, 4, 1, 48, seed=8)
    up = split_up_projection(draw(16 * 32, 32, seed=9), 16, 16)
    starts, lens, table = batch.query_starts, batch.seq_lens, batch.block_table
    recorded = dataclasses.replace(
        batch,
        query_starts=torch.cat((starts, starts[-1:].expand(2))),
        seq_lens=torch.cat((lens, lens.new_ones(2))),
        block_table=torch.cat((table, torch.zeros_like(table[:2]))),
        query_lens=(),
        host_seq_lens=(),
        num_decodes=0,
        host_table=None,
    )
    q, q_rope = fused.split(16, dim=-1)
    got = TritonKernels(DEVICE).latent_attention(q, q_rope, cache, recorded, up, scale=0.1)[:30]
    wanted = ReferenceKernels(DEVICE).latent_attention(q[:30], q_rope[:30], cache, batch, up, scale=0.1)
    assert relative_error(got, wanted) < TOLERANCE[torch.float32]


def test_latents_land_in_their_slots_and_nowhere_else() -> None:
    latent, k_rope = draw(3, 40, seed=4)[:, 8:32], draw(3, 20, seed=5)[:, 4:12]
    caches = [draw(5, 4, 1, 32, seed=6) for _ in range(2)]
    for kernels, cache in zip((TritonKernels(DEVICE), ReferenceKernels(DEVICE)), caches, strict=True):
        kernels.write_latent(cache, torch.tensor([9, 2, 18], device=DEVICE), latent, k_rope)
    assert torch.equal(*caches)
