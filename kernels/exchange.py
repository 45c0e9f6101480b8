"""Forms of the exchange of rows between the ranks that share a layer's experts; kernels.api.Exchange has the contract.

Knows a process group at most, never how many groups there are or why.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.nn import functional

from kernels.api import Choice, Dispatched, Exchange
from kernels.select import BackendError

OPERATION = "exchange of rows"
DEEP_EP_RANKS = (2, 4, 8)
"""Of one host, for which DeepEP has settings."""
PACKED_ROWS = 512
"""Rows of a rank up to which one all-gather takes values and choices: a call costs more there than copies do."""
TRIED_ROWS = (256, 1024, 4096)
"""Rows of a rank for which "auto" measures both forms."""


@dataclass(frozen=True)
class ExchangeShape:
    """What travels: rows of ``hidden_size`` values, each with ``num_selected`` choices among a group's experts."""

    hidden_size: int
    dtype: torch.dtype
    num_selected: int
    num_experts: int  # of each rank


class LocalExchange:
    """All experts are here."""

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """See Exchange.dispatch."""
        return Dispatched(x, weights, experts, None)

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine."""
        return y


class CollectiveExchange:
    """All rows to all ranks by all-gather, partial sums back in one all-to-all: gloo on CPUs, NCCL on GPUs.

    Shapes are static and nothing is read on the host, so that a CUDA graph can hold it. For R ranks it sends
    R - 1 copies of a row, which is least as long as a row's experts are on most ranks.
    """

    def __init__(self, group: ProcessGroup, num_experts: int, device: torch.device) -> None:
        """``num_experts`` is that of each rank."""
        self._group, self._num_ranks = group, group.size()
        first = 1 + group.rank() * num_experts  # experts travel as one more than they are: rows of zeros are nobody's
        self._local = torch.full((1 + self._num_ranks * num_experts,), -1, dtype=torch.int64, device=device)
        self._local[first : first + num_experts] = torch.arange(num_experts, device=device)

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """See Exchange.dispatch."""
        width, num_selected = x.shape[1] * x.itemsize // 4, experts.shape[1]
        choices = weights.contiguous().view(torch.int32), experts.int() + 1
        if max_rows <= PACKED_ROWS:
            rows = self._gather(torch.cat((x.contiguous().view(torch.int32), *choices), dim=1), max_rows)
            all_x, all_choices = rows[:, :width].contiguous().view(x.dtype), rows[:, width:]
        else:
            all_x = self._gather(x.contiguous(), max_rows)
            all_choices = self._gather(torch.cat(choices, dim=1), max_rows)
        all_weights = all_choices[:, :num_selected].contiguous().view(torch.float32)
        return Dispatched(all_x, all_weights, self._local[all_choices[:, num_selected:]], len(x))

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine."""
        parts = torch.empty_like(y)
        distributed.all_to_all_single(parts, y.contiguous(), group=self._group)
        by_rank = parts.unflatten(0, (self._num_ranks, -1))[:, : sent.handle]
        total = by_rank[0] if self._num_ranks == 2 else by_rank[0].float()  # two are added in fp32 and rounded once
        for part in by_rank[1:]:
            total = total + part
        return total.to(y.dtype)

    def _gather(self, rows: Tensor, max_rows: int) -> Tensor:
        """The rows of all ranks, each rank's filled up with zeros."""
        if len(rows) < max_rows:
            rows = functional.pad(rows, (0, 0, 0, max_rows - len(rows)))
        gathered = rows.new_empty(self._num_ranks * max_rows, rows.shape[1])
        all_gather(gathered, rows, self._group)
        return gathered


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
        buffer, num_rows = self._buffer, len(x)
        if not num_rows:  # a row of nobody, whose experts are nowhere
            x, weights = (part.new_zeros(1, part.shape[1]) for part in (x, weights))
            experts = experts.new_full((1, experts.shape[1]), -1)
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
        return Dispatched(all_x, all_weights, all_experts, (handle, num_rows))

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine; DeepEP's sum is that of the contract."""
        handle, num_rows = sent.handle
        out: Tensor = self._buffer.combine(y.contiguous(), handle)[0]
        return out[:num_rows]


@dataclass(frozen=True)
class SizedExchange:
    """Small steps by one form, those of ``min_rows`` rows and more by another."""

    small: Exchange
    large: Exchange
    min_rows: int

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """See Exchange.dispatch."""
        form = self.large if max_rows >= self.min_rows else self.small
        sent = form.dispatch(x, weights, experts, max_rows=max_rows)
        return replace(sent, handle=(form, sent.handle))

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """See Exchange.combine."""
        form, handle = sent.handle
        combined: Tensor = form.combine(y, replace(sent, handle=handle))
        return combined


def open_exchange(
    group: ProcessGroup, shape: ExchangeShape, device: torch.device, wanted: str
) -> tuple[Exchange, Choice]:
    """The form ``wanted``, or for "auto" the faster one at each size, as measured now; all ranks of ``group`` call it.

    Raises BackendError for an unknown form, or for a named one that cannot be had, with the cause.
    """
    if wanted not in ("auto", "collective", "deep_ep"):
        raise BackendError(f"unknown exchange {wanted!r}: engine.exchange must be one of auto, collective, deep_ep")
    library = "NCCL" if device.type == "cuda" else "gloo"
    collective = CollectiveExchange(group, shape.num_experts, device)
    if wanted == "collective":
        return collective, Choice(OPERATION, "collective", f"{library}, as asked for")
    try:
        deep_ep = DeepEpExchange(open_deep_ep(group, shape, device), shape.num_experts)
    except BackendError as error:
        if wanted == "deep_ep":
            raise
        return collective, Choice(OPERATION, "collective", f"{library}; deep_ep: {error}")
    if wanted == "deep_ep":
        return deep_ep, Choice(OPERATION, "deep_ep", "as asked for")
    return _faster(group, shape, device, collective, deep_ep)


def _faster(
    group: ProcessGroup, shape: ExchangeShape, device: torch.device, collective: Exchange, deep_ep: Exchange
) -> tuple[Exchange, Choice]:
    """DeepEP from the size on at which, and above which, it is faster on the slowest rank."""
    times = torch.tensor(
        [[pair_seconds(form, group, shape, rows, device) for form in (collective, deep_ep)] for rows in TRIED_ROWS]
    )
    distributed.all_reduce(times, distributed.ReduceOp.MAX, group=group)
    torch.cuda.empty_cache()
    min_rows = None
    for rows, (by_collective, by_deep_ep) in zip(reversed(TRIED_ROWS), reversed(times.tolist()), strict=True):
        if by_deep_ep >= by_collective:
            break
        min_rows = rows
    measured = ", ".join(
        f"{rows} rows {pair[1] * 1e6:.0f} (NCCL {pair[0] * 1e6:.0f}) us"
        for rows, pair in zip(TRIED_ROWS, times.tolist(), strict=True)
    )
    if min_rows is None:
        return collective, Choice(OPERATION, "collective", f"NCCL; deep_ep is slower: {measured}")
    reason = f"from {min_rows} rows on, NCCL below; measured: {measured}"
    return SizedExchange(collective, deep_ep, min_rows), Choice(OPERATION, "deep_ep", reason)


def open_deep_ep(group: ProcessGroup, shape: ExchangeShape, device: torch.device) -> Any:
    """A buffer for such rows on all ranks of ``group``, which all call it. Raises BackendError with the cause."""
    if device.type != "cuda":
        raise BackendError(f"it joins NVIDIA GPUs, not {device}")
    if shape.dtype != torch.bfloat16:
        raise BackendError(f"it moves bfloat16, not {shape.dtype}")
    if group.size() not in DEEP_EP_RANKS:
        raise BackendError(f"it joins {', '.join(map(str, DEEP_EP_RANKS))} GPUs of a host, not {group.size()}")
    cause = ""
    try:
        _load_nvshmem()
        deep_ep = importlib.import_module("deep_ep")
    except (ImportError, OSError) as error:
        cause = f"deep_ep cannot be imported: {error}"
    has_failed = torch.tensor([len(cause)])
    distributed.all_reduce(has_failed, group=group)  # one that is alone would wait for the others
    if has_failed.item():
        raise BackendError(cause or "deep_ep cannot be imported on another rank")
    configs = (
        config(group.size()) for config in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config)
    )
    row_bytes = shape.hidden_size * shape.dtype.itemsize
    try:
        num_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in configs)
        return deep_ep.Buffer(group, num_bytes, 0)
    except (RuntimeError, AssertionError) as error:
        raise BackendError(f"deep_ep cannot join the GPUs: {error}") from error


def _load_nvshmem() -> None:
    """Load the library that deep_ep is linked to from its pip package, which is on no search path."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(root).glob("nvshmem/lib/libnvshmem_host.so.*"):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return


def pair_seconds(
    exchange: Exchange, group: ProcessGroup, shape: ExchangeShape, num_rows: int, device: torch.device
) -> float:
    """Device time of one dispatch and combine of so many rows a rank, whose experts are anywhere, without launches."""
    x, weights, experts = random_rows(group, shape, num_rows, device)

    def pair() -> None:
        sent = exchange.dispatch(x, weights, experts, max_rows=num_rows)
        exchange.combine(sent.x, sent)

    return recorded_seconds(pair, device)


def random_rows(
    group: ProcessGroup, shape: ExchangeShape, num_rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, hidden], weights and experts [N, K] of a rank's rows, experts of any rank."""
    generator = torch.Generator(device).manual_seed(group.rank())
    scores = torch.rand(num_rows, group.size() * shape.num_experts, device=device, generator=generator)
    weights, experts = scores.topk(shape.num_selected)
    x = torch.randn(num_rows, shape.hidden_size, device=device, generator=generator).to(shape.dtype)
    return x, weights, experts


def recorded_seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Mean time of ``call`` in a CUDA graph that holds it ``repeats`` times; on a CPU, of as many calls."""
    if device.type != "cuda":
        start_s = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start_s) / repeats
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        for _ in range(repeats):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3 / repeats


def all_gather(out: Tensor, x: Tensor, group: ProcessGroup) -> None:
    """Write ``x`` [N, ...] of each rank into ``out`` [R * N, ...]; torch has two names for it."""
    gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    gather(out, x, group=group)
