"""Mixture-of-experts operations in plain torch: routing, sorting by expert, grouped GEMM, weighted sum.

Shape legend as in kernels.api. Nothing here reads a tensor on the host but the loop of ``grouped_linear``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.api import ExpertRows, Gate, Scoring


@dataclass(frozen=True)
class PackedExperts:
    """Stacked weights of E gated MLPs."""

    gate_up: Tensor  # [E, 2I, hidden]
    down: Tensor  # [E, hidden, I]
    is_fp8: bool = False  # the weights stand for fp8 codes, and what they multiply is rounded to such
    limit: float | None = None  # of activations


def limit_gates(gate_up: Tensor, limit: float | None) -> Tensor:
    """Clamp gates [N, first half] to at most ``limit`` and ups [N, second half] to within it, in place."""
    if limit is not None:
        gate, up = gate_up.chunk(2, dim=-1)
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    return gate_up


def score(logits: Tensor, scoring: Scoring) -> Tensor:
    """Scores of logits [N, E], or of parts [P, N, E] that add up to them; all but softmax are elementwise."""
    logits = logits.sum(0) if logits.dim() == 3 else logits
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if scoring is Scoring.SIGMOID else functional.softplus(logits).sqrt()


def pick(scores: Tensor, gate: Gate, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See Kernels.route, from scores [N, E]."""
    ranking = scores if bias is None else scores + bias
    if gate.num_groups > 1:
        ranking = _hide_other_groups(ranking, gate)
    experts = _top_indices(ranking, gate.num_selected)
    return weigh(scores, gate, experts), experts


def weigh(scores: Tensor, gate: Gate, experts: Tensor) -> Tensor:
    """Weights [N, K] of ``experts`` [N, K] from scores [N, E]: normalised if asked, times scale."""
    weights = scores.gather(1, experts)
    if gate.is_normalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * gate.scale


def _hide_other_groups(ranking: Tensor, gate: Gate) -> Tensor:
    grouped = ranking.unflatten(1, (gate.num_groups, -1))
    group_scores = grouped.topk(gate.num_best_in_group, dim=-1).values.sum(dim=-1)
    is_picked = torch.zeros_like(group_scores, dtype=torch.bool)
    is_picked.scatter_(1, _top_indices(group_scores, gate.num_groups_selected), True)
    return grouped.masked_fill(~is_picked[..., None], -torch.inf).flatten(1)  # biased scores may be below zero


def _top_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values of each row, lowest index first on ties, which torch.topk does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def sort_by_expert(experts: Tensor, num_experts: int, alignment: int) -> ExpertRows:
    """Lay the pairs (row, expert) of int64 [N, K] out for a grouped GEMM."""
    num_pairs, device = experts.numel(), experts.device
    num_rows = num_pairs + min(num_pairs, num_experts) * (alignment - 1)
    num_rows = -(-num_rows // alignment) * alignment
    known = torch.where(experts < 0, num_experts, experts)
    sorted_experts, order = known.flatten().sort(stable=True)
    bounds = torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=device))
    padded_counts = (bounds.diff() + alignment - 1) // alignment * alignment
    ends = padded_counts.cumsum(0)
    starts = torch.cat((ends - padded_counts, ends[-1:]))
    shifts = starts - bounds
    places_in_order = torch.arange(num_pairs, device=device) + shifts[sorted_experts]
    sources = torch.zeros(num_rows, dtype=torch.int64, device=device)
    sources[places_in_order] = order // experts.shape[1]
    expert_of = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    expert_of[places_in_order] = torch.where(sorted_experts < num_experts, sorted_experts, -1).int()
    places = torch.empty_like(order)
    places[order] = places_in_order
    return ExpertRows(sources, expert_of, ends.int(), places.view_as(experts))


def grouped_linear(x: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
    """See Kernels.grouped_linear; in bfloat16 on CUDA one call of torch, else one linear for each expert."""
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=rows.ends)
    out = x.new_zeros(len(x), weight.shape[1])
    start = 0
    for expert, end in enumerate(rows.ends.tolist()):
        if end > start:
            out[start:end] = functional.linear(x[start:end], weight[expert])
        start = end
    return out


def combine(y: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    """Weighted sum over each row's slots, in slot order: y [X, hidden], weights [N, K] -> [N, hidden] in y's dtype."""
    is_void = (rows.experts < 0)[rows.places]  # then y is undefined
    total = torch.zeros(len(weights), y.shape[1], dtype=torch.float32, device=y.device)
    for slot in range(weights.shape[1]):
        part = y[rows.places[:, slot]].float().masked_fill_(is_void[:, slot, None], 0)
        total += part.mul_(weights[:, slot, None])  # not addcmul: each value is rounded alike wherever it lies
    return total.to(y.dtype)
