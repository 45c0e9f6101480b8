"""The batch-invariant operations in Triton: what the reference computes, and on a GPU the same bits in any batch."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.api import Gate, SamplingBatch, Scoring
from kernels.reference import PackedWeight, ReferenceKernels
from tests.step_batches import attention_batch, block_tables, move_batch

pytest.importorskip("triton", reason="triton is not installed")

from kernels.reference_mla import split_up_projection
from kernels.triton_invariant import EXPERT_TILINGS, TILINGS, InvariantTritonKernels, choose_tiling, multiply
from tests.kernels.test_triton_dense import DEVICE, HAS_GPU, TOLERANCE, draw, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf arithmetic in the interpreter
DTYPES = [torch.bfloat16, torch.float32] if HAS_GPU else [torch.float32]
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="the interpreter has no matrix instructions whose order could differ")
SIZES = (1, 2, 5, 37, 64, 65, 256, 1000)
DEEP, WIDE = (4096, 96) if HAS_GPU else (80, 40)


def starts(num_rows: int) -> Iterator[tuple[int, int]]:
    """Slices of any size of so many rows, so that a row comes to lie anywhere."""
    firsts = ((first, size) for size in SIZES for first in (0, 3, num_rows - size))
    return ((first, first + size) for first, size in firsts if 0 <= first <= num_rows - size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_reference_biases_views_and_batches_included(dtype: torch.dtype) -> None:
    kernels, reference = InvariantTritonKernels(DEVICE, dtype), ReferenceKernels(DEVICE)
    x, weight, bias = draw(9, DEEP + 16, seed=1).to(dtype)[:, 8:-8], draw(WIDE, DEEP, seed=2).to(dtype), draw(WIDE)
    wanted = reference.linear(x.float(), reference.pack_weight(weight.float(), bias))
    packed = PackedWeight(weight, bias.to(dtype), is_prepacked=False)
    assert relative_error(kernels.linear(x, packed), wanted) < TOLERANCE[dtype]
    assert kernels.wide_linear(x, packed).dtype == torch.float32
    assert kernels.linear(x[:0], packed).shape == (0, WIDE)
    queries, keys = draw(7, 3, 20, seed=3).to(dtype), draw(3, 20, 24, seed=4).to(dtype)
    out = torch.empty(7, 3, 24, dtype=dtype, device=DEVICE)
    multiply(queries.transpose(0, 1), keys.transpose(1, 2), out.transpose(0, 1))
    assert relative_error(out, torch.einsum("nhd,hdr->nhr", queries.float(), keys.float())) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_attention_is_that_of_the_reference(dtype: torch.dtype, window: int | None) -> None:
    lens, firsts = [1, 1, 30, 7], [90, 0, 0, 66]
    batch = attention_batch(firsts, lens, block_tables([a + b for a, b in zip(firsts, lens, strict=True)]))
    batch, num_blocks = move_batch(batch, DEVICE), int(batch.block_table.max()) + 1
    q, cache = draw(sum(lens), 4, 32, seed=1).to(dtype), draw(2, num_blocks, 4, 2, 32, seed=2).to(dtype)
    got = InvariantTritonKernels(DEVICE, dtype).attention(q, cache, batch, scale=0.2, window=window)
    wanted = ReferenceKernels(DEVICE).attention(q.float(), cache.float(), batch, scale=0.2, window=window)
    assert relative_error(got, wanted) < TOLERANCE[dtype]
    cache, up = cache.flatten(3)[0][..., None, :40], split_up_projection(draw(4 * 48, 24, seed=3).to(dtype), 4, 16)
    q, q_rope, cache = q[..., :16], q[..., 16:], cache.contiguous()
    got = InvariantTritonKernels(DEVICE, dtype).latent_attention(q, q_rope, cache, batch, up, scale=0.2)
    up = split_up_projection(up.both.float(), 4, 16)
    wanted = ReferenceKernels(DEVICE).latent_attention(q.float(), q_rope.float(), cache.float(), batch, up, scale=0.2)
    assert relative_error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_those_of_the_reference(dtype: torch.dtype, scoring: Scoring) -> None:
    gate, num_experts = Gate(scoring, num_selected=3, is_normalized=True), 10
    x, router = draw(20, 48, seed=1).to(dtype), draw(num_experts, 48, seed=2)
    weights = draw(num_experts, 64, 48, seed=3), draw(num_experts, 48, 32, seed=4)
    results = []
    for kernels, kind in ((InvariantTritonKernels(DEVICE, dtype), dtype), (ReferenceKernels(DEVICE), torch.float32)):
        routed = kernels.route(kernels.router_logits(x.to(kind), kernels.pack_router(router)), gate)
        packed = kernels.pack_experts(*(each.to(dtype).to(kind) for each in weights))
        results.append(kernels.experts_mlp(x.to(kind), *routed, packed))
    assert relative_error(*results) < TOLERANCE[dtype]


def test_many_rows_have_large_tiles_and_few_have_many_programs() -> None:
    assert choose_tiling(4096, 4096, torch.bfloat16) == TILINGS[0]
    assert choose_tiling(256, 1024, torch.bfloat16) == TILINGS[-1]
    assert choose_tiling(1, 150_000, torch.bfloat16).rows == 64
    assert InvariantTritonKernels(DEVICE, torch.bfloat16).choose_tiling(100, 64) == EXPERT_TILINGS[0]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("depth", "width"), [(1024, 4096), (3000, 200), (4096, 32)])
def test_every_tiling_gives_the_same_bits(depth: int, width: int) -> None:
    x, weight = draw(1, 300, depth, seed=1).bfloat16(), draw(1, width, depth, seed=2).bfloat16()
    results = [torch.empty(1, 300, width, device=DEVICE) for _ in TILINGS]
    for tiling, out in zip(TILINGS, results, strict=True):
        multiply(x, weight, out, None, tiling)
    for tiling, result in zip(TILINGS, results, strict=True):
        assert torch.equal(result, results[0]), tiling


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", ["linear", "head", "norm", "silu", "experts", "sigmoid experts", "few of V3"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(operation: str, dtype: torch.dtype) -> None:
    compute, width = row_operation(operation, InvariantTritonKernels(DEVICE, dtype), dtype)
    x = draw(1000, width, seed=1).to(dtype)
    wanted = compute(x)
    for first, end in starts(len(x)):
        assert torch.equal(compute(x[first:end]), wanted[first:end]), (first, end)


def row_operation(
    name: str, kernels: InvariantTritonKernels, dtype: torch.dtype
) -> tuple[Callable[[Tensor], Tensor], int]:
    """An operation of rows, and how wide they are."""
    if name in ("linear", "head"):
        packed = PackedWeight(draw(1536, 1024, seed=2).to(dtype), None, is_prepacked=False)
        return (lambda x: (kernels.linear if name == "linear" else kernels.wide_linear)(x, packed)), 1024
    if name == "norm":
        weight = draw(1024, seed=2).to(dtype)
        return (lambda x: kernels.add_rms_norm(x.clone(), x.flip(1), weight, 1e-6)[0]), 1024
    if name == "silu":
        return kernels.silu_mul, 1024
    num_experts, hidden, inner, scoring = {
        "experts": (16, 256, 128, Scoring.SOFTMAX),
        "sigmoid experts": (64, 512, 192, Scoring.SIGMOID),
        "few of V3": (8, 2048, 256, Scoring.SIGMOID),
    }[name]
    gate = Gate(scoring, num_selected=4, is_normalized=True)
    router = kernels.pack_router(draw(num_experts, hidden, seed=3))
    shapes = (num_experts, 2 * inner, hidden), (num_experts, hidden, inner)
    packed_experts = kernels.pack_experts(*(draw(*shape, seed=4).to(dtype) for shape in shapes))
    return (
        lambda x: kernels.experts_mlp(x, *kernels.route(kernels.router_logits(x, router), gate), packed_experts)
    ), hidden


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "window"), [((16, 8, 128), None), ((12, 4, 64), 300), ("latent", None)])
def test_a_row_attends_alike_in_a_chunk_a_decode_and_beside_others(
    heads: tuple[int, int, int] | str, window: int | None, dtype: torch.dtype
) -> None:
    kernels, num_keys = InvariantTritonKernels(DEVICE, dtype), 777
    tables = block_tables([num_keys, 1500, 40, *[200] * 300], block_size=16)
    num_blocks = sum(map(len, tables)) + 1
    if isinstance(heads, str):
        up, cache = split_up_projection(draw(16 * 256, 512, seed=1).to(dtype), 16, 128), draw(num_blocks, 16, 1, 576)
        shape = (16, 192)
    else:
        shape, cache = heads[::2], draw(2, num_blocks, 16, *heads[1:], seed=2)
    cache, q = cache.to(dtype), draw(num_keys, *shape, seed=3).to(dtype)

    def attend(rows: Tensor, firsts: list[int], lens: list[int], which: list[int]) -> Tensor:
        batch = move_batch(attention_batch(firsts, lens, [tables[at] for at in which], 16), DEVICE)
        if isinstance(heads, str):
            return kernels.latent_attention(rows[..., :128], rows[..., 128:], cache, batch, up, scale=0.1)
        return kernels.attention(rows, cache, batch, scale=0.1, window=window)

    wanted = attend(q, [0], [num_keys], [0])
    for first, size in ((0, 1), (5, 1), (63, 2), (64, 70), (300, 477), (776, 1)):
        others = [1499, 0, *[199] * 300], [1, 40, *[1] * 300], [1, 2, *range(3, 303)]
        rows = draw(341, *shape, seed=4).to(dtype)
        mixed = torch.cat((rows[:41], q[first : first + size], rows[41:]))
        firsts, lens, which = ([*own[:2], mine, *own[2:]] for own, mine in zip(others, (first, size, 0), strict=True))
        assert torch.equal(attend(mixed, firsts, lens, which)[41 : 41 + size], wanted[first : first + size]), first
        assert torch.equal(attend(q[first : first + size], [first], [size], [0]), wanted[first : first + size]), first


@pytest.mark.gpu
@on_gpu
def test_a_row_is_drawn_alike_whatever_others_ask_for() -> None:
    kernels, logits = InvariantTritonKernels(DEVICE, torch.bfloat16), draw(64, 50_000, seed=1)
    zeros = torch.zeros(64, device=DEVICE)
    ids = torch.arange(64, device=DEVICE)
    greedy = kernels.sample(logits.clone(), SamplingBatch(zeros, ids, ids, is_all_greedy=True))
    warm = zeros.clone()
    warm[1::2] = 0.8
    filters = {"top_k": ids % 5 // 2 * 20, "top_p": 1 - ids % 3 / 5, "min_p": ids % 7 // 6 / 50}
    mixed = kernels.sample(logits.clone(), SamplingBatch(warm, ids, ids, **filters))
    for row in range(64):
        of_row = (part[row : row + 1] for part in (warm, ids, ids))
        used = {name: part[row : row + 1] for name, part in filters.items() if part[row] != (name == "top_p")}
        alone = kernels.sample(logits[row : row + 1].clone(), SamplingBatch(*of_row, **used))
        for index in range(2):
            assert torch.equal(alone[index][0], mixed[index][row])
    for index in range(2):
        assert torch.equal(mixed[index][::2], greedy[index][::2])
