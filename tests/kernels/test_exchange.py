"""Forms of the exchange against the plain sum that they must give; that of DeepEP on two GPUs."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from engine.dist import ENVIRONMENT
from kernels.api import Dispatched, Exchange
from kernels.exchange import (
    PACKED_ROWS,
    TRIED_ROWS,
    CollectiveExchange,
    DeepEpExchange,
    ExchangeShape,
    LocalExchange,
    SizedExchange,
    open_deep_ep,
    open_exchange,
    random_rows,
)
from kernels.select import BackendError

CPU = torch.device("cpu")
SHAPE = ExchangeShape(hidden_size=2048, dtype=torch.bfloat16, num_selected=6, num_experts=32)
SMALL = ExchangeShape(hidden_size=8, dtype=torch.float32, num_selected=2, num_experts=4)
HAS_DEEP_EP = importlib.util.find_spec("deep_ep") is not None


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[distributed.ProcessGroup]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def weighted(sent: Dispatched) -> torch.Tensor:
    """As if each expert gave its row back; the weights of other ranks' experts are undefined."""
    shares = torch.where(sent.experts >= 0, sent.weights, 0).sum(1, keepdim=True)
    return torch.where(shares > 0, sent.x.float() * shares, 0).to(sent.x.dtype)


@pytest.mark.parametrize("max_rows", [5, PACKED_ROWS, PACKED_ROWS + 1])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_rows_travel_alike_with_their_choices_and_apart_from_them(
    alone: distributed.ProcessGroup, max_rows: int, num_rows: int
) -> None:
    x, weights, experts = random_rows(alone, SMALL, num_rows, CPU)
    exchange = CollectiveExchange(alone, SMALL.num_experts, CPU)
    sent = exchange.dispatch(x, weights, experts, max_rows=max_rows)
    for there, here in zip((sent.x, sent.weights, sent.experts), (x, weights, experts), strict=True):
        assert len(there) == max_rows
        assert torch.equal(there[:num_rows], here)
    assert (sent.experts[num_rows:] == -1).all()
    assert torch.equal(exchange.combine(sent.x, sent), x)


def test_steps_go_by_the_form_for_their_size(alone: distributed.ProcessGroup) -> None:
    collective = CollectiveExchange(alone, SMALL.num_experts, CPU)
    exchange = SizedExchange(collective, LocalExchange(), min_rows=6)
    x, weights, experts = random_rows(alone, SMALL, 4, CPU)
    for max_rows, num_sent in ((5, 5), (6, 4)):
        sent = exchange.dispatch(x, weights, experts, max_rows=max_rows)
        assert len(sent.x) == num_sent
        assert torch.equal(exchange.combine(sent.x, sent), x)


@pytest.mark.parametrize(
    ("wanted", "cause"), [("nccl", "unknown exchange 'nccl'"), ("deep_ep", "it joins NVIDIA GPUs, not cpu")]
)
def test_a_named_exchange_that_cannot_be_had_is_an_error(
    alone: distributed.ProcessGroup, wanted: str, cause: str
) -> None:
    with pytest.raises(BackendError, match=cause):
        open_exchange(alone, SHAPE, CPU, wanted)


def test_without_gpus_the_choice_falls_back_and_says_why(alone: distributed.ProcessGroup) -> None:
    exchange, choice = open_exchange(alone, SHAPE, CPU, "auto")
    assert isinstance(exchange, CollectiveExchange)
    assert (choice.backend, choice.reason) == ("collective", "gloo; deep_ep: it joins NVIDIA GPUs, not cpu")


@pytest.mark.parametrize(
    ("shape", "cause"), [(SMALL, "it moves bfloat16, not torch.float32"), (SHAPE, "it joins 2, 4, 8 GPUs of a host")]
)
def test_what_deep_ep_does_not_take_is_named(alone: distributed.ProcessGroup, shape: ExchangeShape, cause: str) -> None:
    with pytest.raises(BackendError, match=cause):
        open_deep_ep(alone, shape, torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.skipif(not HAS_DEEP_EP, reason="deep_ep is not installed")
def test_rows_of_two_ranks_come_back_summed_recorded_or_not(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path / "meeting"),), nprocs=2)


def run_rank(rank: int, meeting: str) -> None:
    """Each rank with another number of rows; fails in the process that spawned it."""
    os.environ |= ENVIRONMENT
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group = distributed.group.WORLD
    deep_ep = DeepEpExchange(open_deep_ep(group, SHAPE, device), SHAPE.num_experts)
    collective = CollectiveExchange(group, SHAPE.num_experts, device)
    for num_rows, max_rows in (((512, 300)[rank], 512), ((0, 1)[rank], 1), ((1000, 1)[rank], 1000)):
        x, weights, experts = random_rows(group, SHAPE, num_rows, device)

        def once(exchange: Exchange) -> torch.Tensor:
            sent = exchange.dispatch(x, weights, experts, max_rows=max_rows)  # noqa: B023
            assert len(sent.x) == 2 * max_rows  # noqa: B023
            return exchange.combine(weighted(sent), sent)

        wanted = once(collective)
        torch.testing.assert_close(wanted.float(), x.float() * weights.sum(1, keepdim=True), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(once(deep_ep), wanted, atol=0, rtol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = once(deep_ep)
        for _ in range(3):
            graph.replay()
        torch.testing.assert_close(out, wanted, atol=0, rtol=0)
        del graph
    _, choice = open_exchange(group, SHAPE, device, "auto")
    assert all(f"{rows} rows" in choice.reason for rows in TRIED_ROWS), choice.reason
    distributed.barrier()
    os._exit(0)  # buffers of DeepEP wait for each other when they are collected
