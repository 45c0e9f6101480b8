"""The ranks of an engine and what they say to each other: the only file that knows how many there are.

A group of one rank does nothing, so that a single rank runs the same code. Tensors travel by gloo on CPUs and NCCL on
GPUs, control by gloo; all ranks are on one host. Knows no layers and no steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, distributed

from engine.expert_slots import count_slots
from engine.topology import Topology
from kernels.api import Choice, Exchange
from kernels.exchange import ExchangeShape, LocalExchange, all_gather, open_exchange

if TYPE_CHECKING:
    from engine.models.spec import ModelSpec

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "NCCL_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "NCCL_NVLS_ENABLE": "0",  # NVLink multicast needs rights that containers often lack
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
"""Defaults; what the operator has set stays."""

TIMEOUT = timedelta(hours=4)
"""Of a collective. The client ends a silent engine long before."""


class Group:
    """Some ranks, this one among them."""

    def __init__(self, process_group: distributed.ProcessGroup | None = None) -> None:
        """None: this rank alone."""
        self._group = process_group
        self.size = process_group.size() if process_group else 1
        self.index = process_group.rank() if process_group else 0

    def add(self, x: Tensor) -> Tensor:
        """Sum up over ranks; ``x`` may be overwritten."""
        if self._group:
            distributed.all_reduce(x, group=self._group)
        return x

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over ranks, by the host."""
        if not self._group:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        distributed.all_reduce(tensor, distributed.ReduceOp.MAX, group=self._group)
        return tensor.tolist()

    def smallest(self, value: int) -> int:
        """The smallest over ranks, by the host."""
        return -self.largest([-value])[0]

    def stack(self, x: Tensor) -> Tensor:
        """``x`` of all ranks, in order: [R, *x.shape]."""
        if not self._group or not x.numel():
            return x[None].expand(self.size, *x.shape)
        stacked = x.new_empty(self.size * len(x), *x.shape[1:])
        all_gather(stacked, x.contiguous(), self._group)
        return stacked.view(self.size, *x.shape)

    def gather(self, x: Tensor, num_rows: int) -> Tensor:
        """The rows ``x`` [N, ...] of all ranks, one rank's below the other's, unless N is already ``num_rows``."""
        if len(x) == num_rows:
            return x
        return self.stack(x).flatten(0, 1)

    def send(self, x: Tensor) -> None:
        """Hand ``x`` to the others, which ``receive`` it."""
        if self._group:
            distributed.broadcast(x, group=self._group, group_src=0)

    def receive(self, x: Tensor) -> Tensor:
        """Overwrite ``x`` with what the first rank sends."""
        self.send(x)
        return x

    def send_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hand int64 arrays to the others, which ``receive_arrays`` of the same names and numbers of dimensions."""
        if self._group:
            shapes = [size for array in arrays.values() for size in array.shape]
            self.send(torch.tensor([len(shapes), *shapes, *[0] * (MAX_SIZES - len(shapes))]))
            self.send(torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()])))

    def receive_arrays(self, num_dims: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Arrays that the first rank sends, by name in the order of ``num_dims``."""
        num_sizes, *sizes = self.receive(torch.empty(1 + MAX_SIZES, dtype=torch.int64)).tolist()
        assert num_sizes == sum(num_dims.values()), "both ends of the pipe are of one version"
        shapes = {}
        for name, count in num_dims.items():
            shapes[name], sizes = tuple(sizes[:count]), sizes[count:]
        lengths = [int(np.prod(shape)) for shape in shapes.values()]
        flat = self.receive(torch.empty(sum(lengths), dtype=torch.int64)).numpy()
        parts = np.split(flat, np.cumsum(lengths)[:-1])
        return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def swap(self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]) -> None:
        """Send tensors to ranks of the group and fill others from ranks, in one order between any two ranks.

        They are contiguous and travel as bytes, since fp8 is no type that every library sends.
        """
        operations = [(distributed.isend, *each) for each in sent] + [(distributed.irecv, *each) for each in received]
        if self._group and operations:
            each = [
                distributed.P2POp(op, x.view(torch.uint8), group=self._group, group_peer=peer)
                for op, x, peer in operations
            ]
            for work in distributed.batch_isend_irecv(each):
                work.wait()

    def exchange(self, shape: ExchangeShape, device: torch.device, wanted: str) -> tuple[Exchange, Choice]:
        """The exchange of rows between ranks that share experts, see kernels.exchange.open_exchange."""
        assert self._group, "a rank alone has all experts"
        return open_exchange(self._group, shape, device, wanted)


MAX_SIZES = 31
"""Sizes of all dimensions of the arrays that are sent at once."""


@dataclass(frozen=True)
class Ranks:
    """This rank's groups."""

    topology: Topology = field(default_factory=Topology)
    rank: int = 0
    replica: Group = field(default_factory=Group)  # works on the same rows
    tensor: Group = field(default_factory=Group)
    context: Group = field(default_factory=Group)
    experts: Group = field(default_factory=Group)
    exchange: Exchange = field(default_factory=LocalExchange)  # of rows in ``experts``
    lockstep: Group = field(default_factory=Group)  # of leaders

    @property
    def is_leader(self) -> bool:
        """Whether this rank has the replica's traffic."""
        return self.replica.index == 0


def share_experts(
    ranks: Ranks, spec: ModelSpec, dtype: torch.dtype, device: torch.device, wanted: str
) -> tuple[Ranks, Choice]:
    """Open the exchange of rows of ranks that share experts; all of them call it.

    Raises SettingsError if the model cannot be divided so, BackendError if the exchange ``wanted`` cannot be had.
    """
    ranks.topology.check_model(spec)
    assert spec.experts is not None, "the topology was checked"
    num_slots = count_slots(spec.experts.num_experts, ranks.experts.size, ranks.topology.expert_copies)
    shape = ExchangeShape(spec.hidden_size, dtype, spec.experts.gate.num_selected, num_slots)
    exchange, choice = ranks.experts.exchange(shape, device, wanted)
    return replace(ranks, exchange=exchange), choice


def connect(topology: Topology, rank: int, rendezvous: str, device: torch.device) -> Ranks:
    """Meet the other ranks at the file ``rendezvous``, which nobody has used before; blocks until all are there."""
    kinds = {
        "replica": topology.replica_groups(),
        "tensor": topology.tensor_groups(),
        "context": topology.context_groups(),
        "experts": topology.expert_groups(),
        "lockstep": topology.lockstep_groups(),
    }
    shared = {name: groups for name, groups in kinds.items() if any(len(ranks) > 1 for ranks in groups)}
    if not shared:  # replicas that share nothing need not meet
        return Ranks(topology, rank)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=topology.num_ranks,
        timeout=TIMEOUT,
    )
    joined: dict[str, Any] = {name: _join(groups, rank) for name, groups in shared.items()}
    return Ranks(topology, rank, **joined)


def _join(groups: Sequence[tuple[int, ...]], rank: int) -> Group:
    """The group that ``rank`` is in, if any; every rank makes all of them, in the same order."""
    made = {ranks: distributed.new_group(list(ranks), timeout=TIMEOUT) for ranks in groups}
    return next((Group(process_group) for ranks, process_group in made.items() if rank in ranks), Group())
