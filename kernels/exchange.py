"""Forms of the exchange of rows between the ranks that share a layer's experts; kernels.api.Exchange has the contract.

Knows a process group at most, never how many groups there are or why.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from kernels.api import Choice, Dispatched


class LocalExchange:
    """All experts are here."""

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """See Exchange.dispatch."""
        return Dispatched(x, weights, experts, None)

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine."""
        return y


class CollectiveExchange:
    """All rows to all ranks in one all-gather, partial sums back in one all-to-all: gloo on CPUs, NCCL on GPUs.

    Shapes are static and nothing is read on the host, so that a CUDA graph can hold it. For R ranks it sends
    R - 1 copies of a row, which is least as long as a row's experts are on most ranks.
    """

    def __init__(self, group: ProcessGroup, num_experts: int) -> None:
        """``num_experts`` is that of each rank."""
        self._group, self._num_experts = group, num_experts
        self._num_ranks, self._first = group.size(), group.rank() * num_experts

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """See Exchange.dispatch; a row travels as bytes: values, weights, experts."""
        parts = [part.contiguous().view(torch.uint8) for part in (x, weights, experts.int())]
        sizes = [part.shape[1] for part in parts]
        mine = x.new_zeros((max_rows, sum(sizes)), dtype=torch.uint8)
        torch.cat(parts, dim=1, out=mine[: len(x)])
        mine[len(x) :, -sizes[2] :] = 255  # rows of nobody: expert -1
        rows = mine.new_empty(self._num_ranks * max_rows, mine.shape[1])
        all_gather(rows, mine, self._group)
        all_x, all_weights, all_experts = (part.contiguous() for part in rows.split(sizes, dim=1))
        local = all_experts.view(torch.int32).long() - self._first
        is_here = (local >= 0) & (local < self._num_experts)
        local = torch.where(is_here, local, -1)
        return Dispatched(all_x.view(x.dtype), all_weights.view(torch.float32), local, len(x))

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine."""
        parts = torch.empty_like(y)
        distributed.all_to_all_single(parts, y.contiguous(), group=self._group)
        by_rank = parts.unflatten(0, (self._num_ranks, -1))[:, : sent.handle]
        total = by_rank[0].float()
        for part in by_rank[1:]:
            total = total + part
        return total.to(y.dtype)


class DeepEpExchange:
    """Each row once to every rank that holds one of its experts, by DeepEP over NVLink: bfloat16, GPUs of one host.

    There is room for all rows of all ranks, so that nothing is read on the host and a CUDA graph can hold it; places
    that no row took have expert -1.
    """

    def __init__(self, buffer: Any, num_experts: int) -> None:
        """``buffer`` is that of ``open_deep_ep``, for all layers; ``num_experts`` is that of each rank."""
        self._buffer, self._num_experts = buffer, num_experts

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """See Exchange.dispatch."""
        buffer = self._buffer
        experts = experts.contiguous()
        by_rank, _, by_expert, is_sent, _ = buffer.get_dispatch_layout(experts, buffer.group_size * self._num_experts)
        all_x, all_experts, all_weights, _, handle, _ = buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=by_rank,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=by_expert,
            topk_idx=experts,
            topk_weights=weights.contiguous(),
            num_worst_tokens=buffer.group_size * max_rows,
        )
        return Dispatched(all_x, all_weights, all_experts, handle)

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine; DeepEP's sum is that of the contract."""
        out: Tensor = self._buffer.combine(y.contiguous(), sent.handle)[0]
        return out


def open_deep_ep(group: ProcessGroup, hidden_size: int, dtype: torch.dtype) -> tuple[Any, Choice]:
    """A buffer for rows of ``hidden_size`` on all ranks of ``group``, or None; all call it. And why."""
    operation, fallback = "exchange of rows", "collective"
    if dtype != torch.bfloat16:
        return None, Choice(operation, fallback, f"deep_ep moves bfloat16, not {dtype}")
    try:
        deep_ep = importlib.import_module("deep_ep")
    except (ImportError, OSError) as error:
        return None, Choice(operation, fallback, f"deep_ep cannot be imported: {error}")
    of_size = deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config
    num_bytes = max(
        config(group.size()).get_nvl_buffer_size_hint(hidden_size * dtype.itemsize, group.size()) for config in of_size
    )
    buffer = deep_ep.Buffer(group, num_bytes, 0)
    return buffer, Choice(operation, "deep_ep", f"rows go to the ranks of their experts alone, {num_bytes} bytes")


def all_gather(out: Tensor, x: Tensor, group: ProcessGroup) -> None:
    """Write ``x`` [N, ...] of each rank into ``out`` [R * N, ...]; torch has two names for it."""
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, x, group=group)
