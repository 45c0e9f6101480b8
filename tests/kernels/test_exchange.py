"""DeepEP's exchange against the plain sum that it must give, on two GPUs; without it, the reason."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed

from kernels.exchange import CollectiveExchange, DeepEpExchange, open_deep_ep

HIDDEN, EXPERTS, SELECTED = 2048, 32, 6  # experts of each rank
HAS_DEEP_EP = importlib.util.find_spec("deep_ep") is not None


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[distributed.ProcessGroup]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def test_other_values_than_bfloat16_are_left_to_the_collectives(alone: distributed.ProcessGroup) -> None:
    buffer, choice = open_deep_ep(alone, HIDDEN, torch.float32)
    assert buffer is None
    assert (choice.backend, "float32" in choice.reason) == ("collective", True)


@pytest.mark.skipif(HAS_DEEP_EP, reason="deep_ep is installed")
def test_without_the_library_the_reason_names_it(alone: distributed.ProcessGroup) -> None:
    buffer, choice = open_deep_ep(alone, HIDDEN, torch.bfloat16)
    assert buffer is None
    assert "deep_ep cannot be imported" in choice.reason


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.skipif(not HAS_DEEP_EP, reason="deep_ep is not installed")
def test_rows_of_two_ranks_come_back_summed_recorded_or_not(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path / "meeting"),), nprocs=2)


def run_rank(rank: int, meeting: str) -> None:
    """Each rank with another number of rows; fails in the process that spawned it."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
    torch.cuda.set_device(rank)
    distributed.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=rank, world_size=2)
    group = distributed.group.WORLD
    buffer, choice = open_deep_ep(group, HIDDEN, torch.bfloat16)
    assert buffer is not None, choice.reason
    generator = torch.Generator("cuda").manual_seed(rank)
    num_rows, max_rows = (300, 512) if rank else (512, 512)
    x = torch.randn(num_rows, HIDDEN, device="cuda", generator=generator).bfloat16()
    scores = torch.rand(num_rows, 2 * EXPERTS, device="cuda", generator=generator)
    experts = scores.argsort(1)[:, :SELECTED].contiguous()
    weights = torch.rand(num_rows, SELECTED, device="cuda", generator=generator)

    def once(exchange: DeepEpExchange | CollectiveExchange) -> torch.Tensor:
        sent = exchange.dispatch(x, weights, experts, max_rows=max_rows)
        assert len(sent.x) == 2 * max_rows
        shares = torch.where(sent.experts >= 0, sent.weights, 0).sum(1, keepdim=True)  # the rest is undefined
        return exchange.combine((sent.x.float() * shares).bfloat16(), sent)

    deep_ep = DeepEpExchange(buffer, EXPERTS)
    wanted = once(CollectiveExchange(group, EXPERTS))
    torch.testing.assert_close(once(deep_ep), wanted, atol=0, rtol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = once(deep_ep)
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(out, wanted, atol=0, rtol=0)
    distributed.barrier()
    distributed.destroy_process_group()
