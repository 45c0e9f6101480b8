"""How many ranks an engine has and what each is for: replicas of attention, shards of weights, holders of experts.

Rank (d * C + c) * T + t is context part c and tensor part t of replica d. Pure arithmetic: the client reads it without
torch, engine.dist makes process groups of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.errors import SettingsError
from schemas.settings import EngineSettings

if TYPE_CHECKING:
    from engine.models.spec import ModelSpec


@dataclass(frozen=True)
class Topology:
    """The four degrees of parallelism, all 1 for one rank, and how shared experts are balanced."""

    data: int = 1  # replicas of the attention, each with rows and a KV cache of its own
    expert: int = 1  # ranks that share a layer's experts; replicas that do so step together
    tensor: int = 1  # shards of each weight matrix
    context: int = 1  # parts of a prefill's rows
    expert_copies: int = 0  # slots of each rank beyond its share of the experts
    rebalance_interval: int = 0  # steps after which a layer's experts are placed anew; 0: never

    @classmethod
    def of(cls, settings: EngineSettings) -> Topology:
        """Read the settings. Raises SettingsError if the degrees do not fit each other."""
        topology = cls(
            data=settings.data_parallel,
            expert=settings.expert_parallel,
            tensor=settings.tensor_parallel,
            context=settings.context_parallel,
            expert_copies=settings.expert_copies,
            rebalance_interval=settings.rebalance_interval,
        )
        topology.check()
        return topology

    @property
    def num_ranks(self) -> int:
        """Processes of the engine; on GPUs, devices."""
        return self.data * self.ranks_per_replica

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on the same rows; the first of them has the traffic."""
        return self.context * self.tensor

    @property
    def leaders(self) -> range:
        """The first rank of each replica."""
        return range(0, self.num_ranks, self.ranks_per_replica)

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Ranks of each replica."""
        return _runs(self.num_ranks, self.ranks_per_replica)

    def tensor_groups(self) -> list[tuple[int, ...]]:
        """Ranks that hold shards of the same weights, in order of shards."""
        return _runs(self.num_ranks, self.tensor)

    def context_groups(self) -> list[tuple[int, ...]]:
        """Ranks that hold parts of the same rows, in order of parts."""
        return [ranks[shard :: self.tensor] for ranks in self.replica_groups() for shard in range(self.tensor)]

    def expert_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share experts, in order of the experts' slots."""
        return _runs(self.num_ranks, self.expert)

    def lockstep_groups(self) -> list[tuple[int, ...]]:
        """Leaders of replicas that share experts: none may step without the others."""
        return _runs(len(self.leaders), max(1, self.expert // self.context), self.ranks_per_replica)

    @property
    def shares_experts(self) -> bool:
        """Whether replicas share experts, so that they step together."""
        return self.expert > self.context

    def check(self) -> None:
        """Raise SettingsError if the degrees do not fit each other."""
        data, expert, tensor, context = self.data, self.expert, self.tensor, self.context
        if expert == 1 and (self.expert_copies or self.rebalance_interval):
            raise SettingsError(
                f"engine.expert_copies {self.expert_copies} and engine.rebalance_interval {self.rebalance_interval} "
                "balance ranks that share experts: set engine.expert_parallel too, or leave them at 0"
            )
        if expert > 1 and tensor > 1:
            raise SettingsError(
                f"engine.expert_parallel {expert} with engine.tensor_parallel {tensor}: models with experts are "
                "divided by experts only, so set engine.tensor_parallel to 1 and raise engine.data_parallel"
            )
        if (data * context) % expert or (expert % context and context % expert):
            raise SettingsError(
                f"engine.expert_parallel {expert} does not divide the {data * context} ranks of engine.data_parallel "
                f"{data} x engine.context_parallel {context} into whole replicas"
            )

    def check_model(self, spec: ModelSpec) -> None:
        """Raise SettingsError if a model of that shape cannot be divided so."""
        if spec.compressed and self.num_ranks > self.data:
            raise SettingsError(f"{spec.architecture} runs on one rank: set engine.data_parallel, no other degree")
        if self.expert > 1 and (spec.experts is None or spec.experts.num_experts < self.expert):
            num_experts = spec.experts.num_experts if spec.experts else 0
            raise SettingsError(f"engine.expert_parallel {self.expert}: the model has {num_experts} experts")
        if self.tensor == 1:
            return
        if spec.experts or spec.latent:
            raise SettingsError(
                f"engine.tensor_parallel {self.tensor}: {spec.architecture} is divided by rows and experts, so set "
                "engine.data_parallel and engine.expert_parallel instead"
            )
        sizes = {
            "attention heads": spec.num_heads,
            "key-value heads": spec.num_kv_heads,
            "inner values of the feed-forward part": spec.intermediate_size,
        }
        if uneven := [f"{size} {name}" for name, size in sizes.items() if size % self.tensor]:
            raise SettingsError(f"engine.tensor_parallel {self.tensor} does not divide {' and '.join(uneven)}")


def _runs(num_ranks: int, size: int, step: int = 1) -> list[tuple[int, ...]]:
    """0 .. num_ranks - 1 in runs of ``size``, each number times ``step``."""
    return [tuple(rank * step for rank in range(first, first + size)) for first in range(0, num_ranks, size)]
