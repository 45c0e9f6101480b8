"""The Triton kernels against the reference: on a GPU where there is one, otherwise in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.api import AttentionBatch, HeadNorms
from kernels.reference import ReferenceKernels

pytest.importorskip("triton", reason="triton is not installed")

from kernels.triton_dense import TritonKernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf arithmetic in the interpreter
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE) if HAS_GPU else [torch.float32]
EXAMPLES = 60 if HAS_GPU else 5
LONGEST = 200 if HAS_GPU else 70  # tokens; the interpreter takes a second for each tile


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30))


def both(dtype: torch.dtype, operation: Callable[[Any, torch.dtype], tuple[Tensor, ...]]) -> None:
    """Run an operation on Triton in ``dtype`` and on the reference in float32; each pair of outputs must agree."""
    got = operation(TritonKernels(DEVICE, dtype), dtype)
    wanted = operation(ReferenceKernels(DEVICE, torch.float32), torch.float32)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == dtype
        assert relative_error(one, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_the_reference_on_views_too(dtype: torch.dtype) -> None:
    weight, fused = draw(48, seed=1), draw(5, 6 * 48, seed=2)

    def norms(kernels: Any, kind: torch.dtype) -> tuple[Tensor, ...]:
        heads = fused.to(kind)[:, 48:192].unflatten(-1, (3, 48))
        rows, residual = fused.to(kind)[:, :48].contiguous(), fused.to(kind)[:, 48:96].contiguous()
        summed = kernels.add_rms_norm(rows.clone(), residual.clone(), weight.to(kind), 1e-5)
        return kernels.rms_norm(heads, weight.to(kind), 1e-6), kernels.rms_norm(rows, weight.to(kind), 1e-5), *summed

    both(dtype, norms)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_products_are_in_float32(dtype: torch.dtype) -> None:
    x, weight = draw(5, 64, seed=1).to(dtype), draw(48, 64, seed=2).to(dtype)
    for bias in (None, draw(48, seed=3).to(dtype)):
        kernels, reference = TritonKernels(DEVICE, dtype), ReferenceKernels(DEVICE)
        got = kernels.wide_linear(x, kernels.pack_weight(weight, bias))
        wanted = reference.linear(
            x.float(), reference.pack_weight(weight.float(), None if bias is None else bias.float())
        )
        assert got.dtype == torch.float32
        assert relative_error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_and_swiglu_equal_the_reference(dtype: torch.dtype) -> None:
    fused, angles = draw(7, (5 + 2) * 32, seed=3), draw(7, 16, seed=4).repeat(1, 2)

    def pointwise(kernels: Any, kind: torch.dtype) -> tuple[Tensor, ...]:
        q, k = (part.unflatten(-1, (-1, 32)) for part in fused.to(kind).split([160, 64], dim=-1))
        cos_sin = angles.cos().to(kind), angles.sin().to(kind)
        norms = HeadNorms(draw(32, seed=7).to(kind), draw(32, seed=8).to(kind), 1e-5)
        rotated = *kernels.rotary(q, k, *cos_sin), *kernels.rotary(q, k, *cos_sin, norms)
        return *rotated, kernels.silu_mul(fused.to(kind))

    both(dtype, pointwise)


def test_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    fused, angles = draw(4, 7 * 16, seed=5), draw(4, 8, seed=4).repeat(1, 2)
    q, k, v = (part.unflatten(-1, (-1, 16)) for part in fused.split([48, 32, 32], dim=-1))
    slots = torch.tensor([9, 2, 31, 16], device=DEVICE)
    norms = HeadNorms(draw(16, seed=7), draw(16, seed=8), 1e-5)
    written = []
    for kernels in (TritonKernels(DEVICE), ReferenceKernels(DEVICE)):
        plain, rotated, normed = (draw(2, 4, 8, 2, 16, seed=6) for _ in range(3))
        kernels.write_kv(plain, slots, k, v)
        turned = (
            kernels.rotary_write_kv(q, k, v, (angles.cos(), angles.sin()), cache=cache, slots=slots, norms=each)
            for cache, each in ((rotated, None), (normed, norms))
        )
        written.append((plain, *turned, rotated, normed))
    assert torch.equal(written[0][0], written[1][0])
    for got, wanted in zip(*written, strict=True):
        assert relative_error(got, wanted) < TOLERANCE[torch.float32]


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_paged_attention_equals_the_reference(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    kv_heads, group = data.draw(st.sampled_from([(1, 4), (2, 2), (3, 3), (2, 1), (1, 16)]))
    head_size, block_size = data.draw(st.sampled_from([16, 64, 96])), data.draw(st.sampled_from([4, 16, 64]))
    window = data.draw(st.sampled_from([None, 1, 17]))
    query_lens = [1] * data.draw(st.integers(0, 6)) + data.draw(st.lists(st.integers(1, LONGEST), max_size=3))
    if not query_lens:
        query_lens = [1]
    num_decodes = next((at for at, length in enumerate(query_lens) if length != 1), len(query_lens))
    seq_lens = [length + data.draw(st.integers(0, LONGEST)) for length in query_lens]
    batch, num_blocks = make_batch(query_lens, seq_lens, num_decodes, block_size)
    q = draw(sum(query_lens), kv_heads * group, head_size, seed=7)
    cache = draw(2, num_blocks, block_size, kv_heads, head_size, seed=8)

    def attend(kernels: Any, kind: torch.dtype) -> tuple[Tensor, ...]:
        out = kernels.attention(q.to(kind), cache.to(kind), batch, scale=head_size**-0.5, window=window)
        assert not out.isnan().any()
        return (out,)

    both(dtype, attend)


@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_a_recorded_step_takes_any_runs_and_padding(data: st.DataObject) -> None:
    """Lengths are on the device only; runs without rows and rows of nobody follow the real ones."""
    dtype = data.draw(st.sampled_from(DTYPES))
    kv_heads, group = data.draw(st.sampled_from([(1, 4), (2, 2), (4, 1)]))
    query_lens = data.draw(st.lists(st.sampled_from([1, 1, 2, 9, LONGEST // 2]), min_size=1, max_size=5))
    seq_lens = [length + data.draw(st.integers(0, LONGEST)) for length in query_lens]
    batch, num_blocks = make_batch(query_lens, seq_lens, 0, 16)
    num_rows, num_padding = sum(query_lens), data.draw(st.integers(0, 3))
    q = draw(num_rows + num_padding, kv_heads * group, 32, seed=7)
    cache = draw(2, num_blocks, 16, kv_heads, 32, seed=8)
    recorded = replace(
        batch,
        block_table=torch.cat(
            (batch.block_table, batch.block_table.new_zeros(num_padding, batch.block_table.shape[1]))
        ),
        seq_lens=torch.cat((batch.seq_lens, batch.seq_lens.new_ones(num_padding))),
        query_starts=torch.cat((batch.query_starts, batch.query_starts[-1:].expand(num_padding))),
        query_lens=(),
        host_seq_lens=(),
    )
    got = TritonKernels(DEVICE, dtype).attention(q.to(dtype), cache.to(dtype), recorded, scale=32**-0.5)[:num_rows]
    wanted = ReferenceKernels(DEVICE).attention(q[:num_rows], cache, batch, scale=32**-0.5)
    assert relative_error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_shared", [0, 16, 48])
def test_what_decode_rows_share_is_read_once_and_changes_nothing(num_shared: int) -> None:
    query_lens = [1, 1, 5, 1, 1, 0]
    seq_lens = [50, 61, 70, 49, 52, 1]
    batch, num_blocks = make_batch(query_lens, seq_lens, 2, 16)
    singles = [0, 1, 3, 4]
    batch.block_table[singles, : num_shared // 16] = batch.block_table[1, : num_shared // 16].clone()
    q, cache = draw(sum(query_lens), 4, 32, seed=7), draw(2, num_blocks, 16, 2, 32, seed=8)
    wanted = ReferenceKernels(DEVICE).attention(q, cache, batch, scale=32**-0.5)
    shared = torch.tensor([num_shared, 1], device=DEVICE)
    for named in (replace(batch, shared=shared), replace(batch, shared=shared, query_lens=(), host_seq_lens=())):
        got = TritonKernels(DEVICE).attention(q, cache, named, scale=32**-0.5)
        assert relative_error(got, wanted) < TOLERANCE[torch.float32]


def make_batch(
    query_lens: list[int], seq_lens: list[int], num_decodes: int, block_size: int
) -> tuple[AttentionBatch, int]:
    num_blocks = [-(-length // block_size) for length in seq_lens]
    order = (torch.randperm(sum(num_blocks), generator=torch.Generator().manual_seed(9)) + 1).tolist()
    table = torch.zeros(len(seq_lens), max(num_blocks), dtype=torch.int64)
    for row, count in zip(table, num_blocks, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)])
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    batch = AttentionBatch(
        slots=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
        block_table=table.to(DEVICE),
        seq_lens=torch.tensor(seq_lens, device=DEVICE),
        query_starts=starts.to(DEVICE),
        positions=torch.zeros(sum(query_lens), dtype=torch.int64, device=DEVICE),
        query_lens=tuple(query_lens),
        host_seq_lens=tuple(seq_lens),
        num_decodes=num_decodes,
    )
    return batch, sum(num_blocks) + 1
