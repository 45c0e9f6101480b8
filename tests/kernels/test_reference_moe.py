"""Routing and experts against loops over rows, groups and experts."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.api import Gate, Scoring
from kernels.reference import ReferenceKernels
from kernels.reference_moe import sort_by_expert

KERNELS = ReferenceKernels()


def brute_force_route(scores: Sequence[Any], bias: Sequence[Any], gate: Gate) -> dict[int, float]:
    """Expert -> weight of one row, by sorting fp32 scalars: groups, then experts, lowest index first on ties."""
    ranking = [score + extra for score, extra in zip(scores, bias, strict=True)]
    size = len(scores) // gate.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(gate.num_groups)]
    group_scores = [
        sum(sorted((ranking[e] for e in group), reverse=True)[: gate.num_best_in_group]) for group in groups
    ]
    picked = sorted(range(gate.num_groups), key=lambda g: (-group_scores[g], g))[: gate.num_groups_selected]
    allowed = [expert for g in picked for expert in groups[g]]
    chosen = sorted(allowed, key=lambda e: (-ranking[e], e))[: gate.num_selected]
    total = sum(scores[e] for e in chosen) if gate.is_normalized else 1.0
    return {e: scores[e] / total * gate.scale for e in chosen}


GATES = {
    "qwen3": Gate(Scoring.SOFTMAX, 3, is_normalized=True),
    "v2-lite": Gate(Scoring.SOFTMAX, 3),
    "v2": Gate(Scoring.SOFTMAX, 3, num_groups=4, num_groups_selected=2, scale=16.0),
    "v3": Gate(
        Scoring.SIGMOID, 4, num_groups=4, num_groups_selected=2, num_best_in_group=2, is_normalized=True, scale=2.5
    ),
}


@pytest.mark.parametrize("name", GATES)
def test_routing_equals_sorting_row_by_row_with_ties_and_biases_below_zero(name: str) -> None:
    gate, generator = GATES[name], torch.Generator().manual_seed(1)
    logits = torch.randint(-2, 3, (200, 12), generator=generator).float()  # few values: many ties
    bias = torch.randint(-3, 2, (12,), generator=generator).float() if name == "v3" else torch.zeros(12)
    weights, experts = KERNELS.route(logits, gate, bias if name == "v3" else None)
    scores = logits.softmax(-1) if gate.scoring is Scoring.SOFTMAX else logits.sigmoid()
    for row in range(len(logits)):
        wanted = brute_force_route(scores[row].numpy(), bias.numpy(), gate)
        assert experts[row].tolist() == list(wanted), "in order of rank"
        torch.testing.assert_close(weights[row], torch.tensor([float(weight) for weight in wanted.values()]))


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 20), num_experts=st.integers(1, 9), alignment=st.sampled_from([1, 4, 128]), data=st.data()
)
def test_each_pair_has_one_place_in_its_experts_aligned_run(
    num_rows: int, num_experts: int, alignment: int, data: st.DataObject
) -> None:
    num_selected = data.draw(st.integers(1, num_experts))
    of_others = data.draw(st.frozensets(st.integers(0, num_experts - 1)))
    chosen = [data.draw(st.permutations(range(num_experts)))[:num_selected] for _ in range(num_rows)]
    picks = [[-1 if expert in of_others else expert for expert in row] for row in chosen]
    experts = torch.tensor(picks, dtype=torch.int64).view(num_rows, num_selected)
    rows = sort_by_expert(experts, num_experts, alignment)
    starts = [0, *rows.ends.tolist()]
    assert all(start % alignment == 0 for start in starts)
    assert starts[-1] <= len(rows.sources) == len(rows.experts)
    assert len(rows.sources) % alignment == 0
    is_here = experts >= 0
    assert sorted(rows.places[is_here].tolist()) == (rows.experts >= 0).nonzero().flatten().tolist()
    assert (rows.experts[rows.places[~is_here]] == -1).all()
    for row in range(num_rows):
        for slot in range(num_selected):
            place, expert = int(rows.places[row, slot]), picks[row][slot]
            if expert < 0:
                continue
            assert (int(rows.sources[place]), int(rows.experts[place])) == (row, expert)
            assert starts[expert] <= place < starts[expert + 1]
    same_shape = sort_by_expert(torch.zeros_like(experts), num_experts, alignment)
    assert len(same_shape.sources) == len(rows.sources), "the length must not depend on the choice"


class AlignedKernels(ReferenceKernels):
    """Rows padded as DeepGEMM wants them, with the worst in the padding."""

    row_alignment = 8

    def grouped_linear(self, x: torch.Tensor, weight: torch.Tensor, rows: Any) -> torch.Tensor:
        """Compute, then spoil what may not be read."""
        out = super().grouped_linear(x, weight, rows)
        out[rows.experts < 0] = torch.nan
        return out


@pytest.mark.parametrize("kernels", [KERNELS, AlignedKernels()])
def test_experts_equal_a_loop_over_rows_and_slots(kernels: ReferenceKernels) -> None:
    generator = torch.Generator().manual_seed(2)
    x, gate_up = torch.randn(7, 10, generator=generator), torch.randn(5, 12, 10, generator=generator)
    down, weights = torch.randn(5, 10, 6, generator=generator), torch.rand(7, 2, generator=generator)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])  # expert 4 gets nothing
    experts[2], experts[4, 0] = -1, -1  # those are on another rank
    got = kernels.experts_mlp(x, weights, experts, kernels.pack_experts(gate_up, down))
    wanted = torch.zeros_like(x)
    for row in range(7):
        for slot in (experts[row] >= 0).nonzero().flatten():
            gate, up = (gate_up[experts[row, slot]] @ x[row]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            wanted[row] += weights[row, slot] * (down[experts[row, slot]] @ inner)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_no_rows_are_no_work() -> None:
    packed = KERNELS.pack_experts(torch.randn(3, 8, 4), torch.randn(3, 4, 4))
    empty = torch.empty(0, 2)
    assert KERNELS.experts_mlp(torch.empty(0, 4), empty, empty.long(), packed).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_recorded_graph_routes_and_computes_whatever_rows_it_is_given() -> None:
    gate, kernels = GATES["v3"], ReferenceKernels(torch.device("cuda"), torch.bfloat16)
    x, router = torch.randn(16, 64, device="cuda").bfloat16(), torch.randn(12, 64, device="cuda")
    gate_up, down = (torch.randn(*shape, device="cuda").bfloat16() * 0.1 for shape in ((12, 64, 64), (12, 64, 32)))
    packed, on_cpu = (
        kernels.pack_experts(gate_up, down),
        KERNELS.pack_experts(gate_up.cpu().float(), down.cpu().float()),
    )

    def compute() -> torch.Tensor:
        weights, experts = kernels.route(torch.nn.functional.linear(x.float(), router), gate)
        return kernels.experts_mlp(x, weights, experts, packed)

    with torch.cuda.stream(torch.cuda.Stream()):
        compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for _ in range(3):
        x.normal_()
        graph.replay()
        rows = x.cpu().float()
        weights, experts = KERNELS.route(torch.nn.functional.linear(rows, router.cpu()), gate)
        torch.testing.assert_close(
            out.cpu().float(), KERNELS.experts_mlp(rows, weights, experts, on_cpu), atol=0.05, rtol=0.05
        )
