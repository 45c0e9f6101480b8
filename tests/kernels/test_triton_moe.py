"""Routing, sorting and grouped GEMMs in Triton against the reference: on a GPU, otherwise in Triton's interpreter."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference_moe
from kernels.api import Gate
from kernels.reference import ReferenceKernels
from tests.kernels.test_reference_moe import GATES

pytest.importorskip("triton", reason="triton is not installed")

from kernels import triton_moe
from kernels.triton_dense import TritonKernels
from tests.kernels.test_triton_dense import DEVICE, DTYPES, HAS_GPU, TOLERANCE, draw, relative_error

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of -inf arithmetic in the interpreter


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("num_experts", [12, 16])
def test_routing_equals_the_reference_ties_and_negative_biases_included(name: str, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-2, 3, (40, num_experts), generator=generator).float().to(DEVICE)  # few values: many ties
    bias = torch.randint(-3, 2, (num_experts,), generator=generator).float().to(DEVICE) if name == "v3" else None
    got = triton_moe.route(logits, GATES[name], bias)
    wanted = ReferenceKernels(DEVICE).route(logits, GATES[name], bias)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_parts_of_logits_are_added_up() -> None:
    parts = torch.randint(-2, 3, (5, 9, 12), generator=torch.Generator().manual_seed(2)).float().to(DEVICE)
    got = triton_moe.route(parts, GATES["v3"], None)
    wanted = ReferenceKernels(DEVICE).route(parts.sum(dim=0), GATES["v3"])
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_router_is_the_exact_sum_of_as_few_planes_as_it_takes(kind: str) -> None:
    weight = draw(12, 200, seed=3).to(getattr(torch, kind))
    planes = triton_moe.split_router(weight)
    assert len(planes) == {"bfloat16": 1, "float32": 3}[kind]
    assert torch.equal(planes.double().sum(0), weight.double())


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "depth"),
    [(0, 12, 200), (3, 12, 200), *([(256, 64, 2048), (5000, 256, 7168)] if HAS_GPU else [])],
)
def test_router_logits_are_those_of_float32(num_rows: int, num_experts: int, depth: int) -> None:
    """Rows and planes are bfloat16 on a GPU, float32 in the interpreter."""
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    fused, weight = draw(num_rows, depth + 8, dtype=torch.bfloat16, seed=4), draw(num_experts, depth, seed=5)
    x = fused[:, :depth]
    parts = triton_moe.router_logits(x.to(dtype), triton_moe.split_router(weight).to(dtype))
    assert parts.shape[1:] == (num_rows, num_experts)
    assert relative_error(parts.sum(0), x.double() @ weight.double().T) < 2e-6


@settings(max_examples=60 if HAS_GPU else 10, deadline=None)
@given(num_rows=st.integers(0, 300), num_experts=st.integers(1, 40), alignment=st.sampled_from([1, 16]), data=st.data())
def test_sorting_equals_the_reference(num_rows: int, num_experts: int, alignment: int, data: st.DataObject) -> None:
    num_selected = data.draw(st.integers(1, min(4, num_experts)))
    generator = torch.Generator().manual_seed(num_rows)
    experts = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :num_selected].to(DEVICE)
    experts = torch.where(experts % 5 == data.draw(st.integers(0, 9)), -1, experts)  # choices that are elsewhere
    got = triton_moe.sort_by_expert(experts, num_experts, alignment)
    wanted = reference_moe.sort_by_expert(experts, num_experts, alignment)
    for field in dataclasses.fields(wanted):
        one, other = getattr(got, field.name), getattr(wanted, field.name)
        assert one.dtype == other.dtype, field.name
        assert torch.equal(one, other), field.name


def test_many_rows_are_sorted_by_programs_that_take_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_moe, "MAX_CHUNKS", 2)
    experts = torch.randint(0, 5, (200, 2), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    got, wanted = (module.sort_by_expert(experts, 5, 16) for module in (triton_moe, reference_moe))
    assert all(torch.equal(getattr(got, f.name), getattr(wanted, f.name)) for f in dataclasses.fields(wanted))


def test_with_room_for_all_rows_each_experts_pairs_come_first_and_nobodys_last() -> None:
    experts = torch.tensor([[1, 3], [3, -1], [0, 3], [-1, 1]], device=DEVICE)
    rows, counts = triton_moe.place_by_expert(experts, 4, 4)
    assert counts.tolist() == [1, 2, 0, 3]
    assert rows.places.tolist() == [[4, 12], [13, 16], [0, 14], [16, 5]]
    x, gate_up = draw(4, 40, seed=5), draw(16, 80, seed=6)
    scattered, gated = triton_moe.scatter_rows(x, rows), triton_moe.silu_mul_rows(gate_up, rows)
    wanted = ReferenceKernels().silu_mul(gate_up)
    for (row, slot), place in [((0, 0), 4), ((0, 1), 12), ((1, 0), 13), ((2, 0), 0), ((2, 1), 14), ((3, 1), 5)]:
        assert (int(rows.sources[place]), int(rows.experts[place])) == (row, int(experts[row, slot]))
        assert torch.equal(scattered[place], x[row])
        torch.testing.assert_close(gated[place], wanted[place])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "hidden", "inner"), [(1, 32, 48), (23, 48, 40), (0, 32, 32)])
def test_experts_equal_the_reference(num_rows: int, hidden: int, inner: int, dtype: torch.dtype) -> None:
    """Depths that the tiles do not divide, experts without rows, one row."""
    x, weights = draw(num_rows, hidden, dtype=dtype), draw(num_rows, 2, seed=1).abs()
    gate_up = draw(7, 2 * inner, hidden, dtype=dtype, seed=2) * 0.3
    down = draw(7, hidden, inner, dtype=dtype, seed=3) * 0.3
    experts = torch.rand(num_rows, 6, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :2].to(DEVICE)
    experts[3::5, 1] = -1
    kernels, oracle = TritonKernels(DEVICE, dtype), ReferenceKernels(DEVICE, torch.float32)
    for limit in (None, 0.5):
        got = kernels.experts_mlp(x, weights, experts, kernels.pack_experts(gate_up, down, limit))
        packed = oracle.pack_experts(gate_up.float(), down.float(), limit)
        wanted = oracle.experts_mlp(x.float(), weights, experts, packed)
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        assert relative_error(got, wanted) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
@pytest.mark.parametrize("num_rows", [5, 256, 900, 4000])
def test_every_tiling_agrees_at_the_size_of_a_real_model(num_rows: int) -> None:
    """DeepSeek-V2-Lite's shapes, in bfloat16."""
    generator = torch.Generator(DEVICE).manual_seed(num_rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    x, gate_up, down = normal(num_rows, 2048), normal(64, 2816, 2048) * 0.02, normal(64, 2048, 1408) * 0.02
    kernels, oracle = TritonKernels(DEVICE, torch.bfloat16), ReferenceKernels(DEVICE, torch.float32)
    weights, experts = kernels.route(normal(num_rows, 64), Gate(GATES["v2-lite"].scoring, 6))
    x, gate_up, down = x.bfloat16(), gate_up.bfloat16(), down.bfloat16()
    got = kernels.experts_mlp(x, weights, experts, kernels.pack_experts(gate_up, down))
    packed = oracle.pack_experts(gate_up.float(), down.float())
    assert relative_error(got, oracle.experts_mlp(x.float(), weights, experts, packed)) < TOLERANCE[torch.bfloat16]
