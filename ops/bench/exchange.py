"""What the exchange of rows between ranks takes, beside the time that the link needs for its bytes.

Each rank is a process; the first one writes a file after each size, so that a timeout loses only what was not measured.
Knows no engine.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from engine.dist import Ranks, connect
from engine.topology import Topology
from kernels.api import Exchange
from kernels.exchange import ExchangeShape, open_exchange, pair_seconds, random_rows, recorded_seconds
from kernels.select import BackendError

FORMS = ("collective", "deep_ep")
ROWS = (8, 64, 256, 512, 1024, 4096)
"""Rows of a rank: decode steps, then prefills."""
CPU_ROWS = (8, 64)
LINK_BYTES = 2**28
CPU_LINK_BYTES = 2**20


def exchange_shape(config: dict[str, Any], num_ranks: int) -> ExchangeShape:
    """What travels in a bfloat16 model of that config.json on so many ranks."""
    num_experts = config["n_routed_experts"] // num_ranks
    return ExchangeShape(config["hidden_size"], torch.bfloat16, config["num_experts_per_tok"], num_experts)


def measure_exchange(
    num_ranks: int, shape: ExchangeShape, device: str, *, rows: tuple[int, ...] = ROWS, timeout_s: float = 60
) -> dict[str, Any]:
    """What was measured on so many ranks of ``device`` until all was, or the time was up."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        meeting = Meeting(num_ranks, directory, shape, device, rows)
        context = spawn(_run_rank, (meeting,), nprocs=num_ranks, join=False)  # type: ignore[no-untyped-call]
        assert context is not None, "it is not joined"
        end_s, error = time.monotonic() + timeout_s, None
        try:
            while not context.join(timeout=max(0.1, end_s - time.monotonic())):
                if time.monotonic() >= end_s:
                    error = f"stopped after {timeout_s:.0f} s"
                    break
        except (ProcessRaisedException, ProcessExitedException) as failure:
            error = str(failure).strip().splitlines()[-1][:500]
        finally:
            for process in context.processes:
                process.kill()
        results = directory / "results.json"
        found: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
    return {"num_ranks": num_ranks, "hidden_size": shape.hidden_size, **found, **({"error": error} if error else {})}


@dataclass(frozen=True)
class Meeting:
    """What all ranks are told."""

    num_ranks: int
    directory: Path
    shape: ExchangeShape
    device: str
    rows: tuple[int, ...]


def _run_rank(rank: int, meeting: Meeting) -> None:
    device, shape, directory = torch.device(meeting.device), meeting.shape, meeting.directory
    torch.set_num_threads(1)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    topology = Topology(data=meeting.num_ranks, expert=meeting.num_ranks)
    ranks = connect(topology, rank, str(directory / "meeting"), device)
    group = distributed.group.WORLD
    assert group is not None, "the ranks have met"
    found: dict[str, Any] = {"link_bytes_per_s": _link_rate(group, device), "vote_us": _vote_us(ranks)}
    found |= {"forms": {}, "times": []}
    exchanges: dict[str, Exchange] = {}
    for form in (*FORMS, "auto"):
        try:
            exchange, choice = open_exchange(group, shape, device, form)
        except BackendError as error:
            found["forms"][form] = str(error)
        else:
            found["forms"][form] = f"{choice.backend}: {choice.reason}"
            exchanges |= {form: exchange} if form in FORMS else {}
    for num_rows in meeting.rows:
        received = _rows_received(group, shape, num_rows, device)
        for form, exchange in exchanges.items():
            seconds = torch.tensor(pair_seconds(exchange, group, shape, num_rows, device))
            distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
            num_bytes = 2 * received[form] * shape.hidden_size * shape.dtype.itemsize
            link_s = num_bytes / found["link_bytes_per_s"]
            found["times"].append(
                {
                    "rows": num_rows,
                    "form": form,
                    "us": round(float(seconds) * 1e6, 1),
                    "link_us": round(link_s * 1e6, 1),
                    "share_of_link": round(link_s / float(seconds), 3),
                }
            )
        if rank == 0:
            (directory / "results.part").write_text(json.dumps(found))
            (directory / "results.part").replace(directory / "results.json")
    distributed.barrier()
    os._exit(0)  # a buffer of DeepEP waits for the other ranks when it is collected, whether they are there or not


def _vote_us(ranks: Ranks, repeats: int = 100) -> float:
    """Of the agreement on a step's size, by the host."""
    start_s = time.perf_counter()
    for _ in range(repeats):
        ranks.lockstep.largest([0] * 6)
    return round((time.perf_counter() - start_s) / repeats * 1e6, 1)


def _link_rate(group: distributed.ProcessGroup, device: torch.device) -> float:
    """Bytes a second that a rank receives while all send to all: the slowest rank's."""
    size = LINK_BYTES if device.type == "cuda" else CPU_LINK_BYTES
    sent = torch.zeros(size - size % group.size(), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    call = lambda: distributed.all_to_all_single(received, sent, group=group)  # noqa: E731
    seconds = torch.tensor(recorded_seconds(call, device, repeats=4))
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
    return len(sent) * (1 - 1 / group.size()) / float(seconds)


def _rows_received(
    group: distributed.ProcessGroup, shape: ExchangeShape, num_rows: int, device: torch.device
) -> dict[str, int]:
    """Rows of others that reach this rank on the way there, by form: all of them, or those that have an expert here.

    As many results come back.
    """
    _, _, experts = random_rows(group, shape, num_rows, device)
    reached = torch.zeros(num_rows, group.size(), dtype=torch.bool, device=device)
    reached.scatter_(1, experts // shape.num_experts, True)
    reached[:, group.rank()] = False
    return {"collective": (group.size() - 1) * num_rows, "deep_ep": int(reached.sum())}
