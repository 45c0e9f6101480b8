"""The engine of a rank that has no traffic: it does what its replica's leader does, as long as its pipe is open."""

from collections.abc import Iterable
from typing import NoReturn

from engine.device import gpu_uuids, resolve_sizes
from engine.parts import Parts
from engine.replica import make_replica
from engine.stats import EngineStats
from schemas.errors import EngineError
from schemas.records import Completion, Constraint, ModelRef, Request
from schemas.settings import EngineSettings


class Follower:
    """Implements engine.rank.EngineLike without requests."""

    credits = 0

    def __init__(self, model: ModelRef, settings: EngineSettings, parts: Parts) -> None:
        self.max_model_len = min(model.max_model_len, parts.model.spec.max_position_embeddings)
        self.device = str(parts.device)
        self.gpus = gpu_uuids(parts.device)
        self.choices = parts.choices
        self.stats = EngineStats()
        sizes = resolve_sizes(settings, parts.device, block_size=parts.model.block_size)
        self._replica = make_replica(
            parts.model, parts.device, parts.ranks, settings, sizes=sizes, max_model_len=self.max_model_len
        )

    def add_constraint(self, constraint: Constraint) -> NoReturn:
        """Refuse it."""
        raise EngineError("a rank that is not the first of its replica has no requests")

    def tokenize(self, request: Request) -> None:
        """Leave it to ``add``."""

    def add(self, request: Request, prompt: None = None) -> NoReturn:
        """Refuse it."""
        raise EngineError(f"request {request.request_id!r} was sent to a rank that is not the first of its replica")

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Nothing is here to be cancelled."""

    def hear(self, num_batches: int) -> None:
        """The leader says when there is work."""

    def beat(self) -> None:
        """Its leader's beat is what it waits for."""

    def has_work(self) -> bool:
        """Always: the leader speaks at least once a second."""
        return True

    def step(self) -> list[Completion]:
        """Wait for the leader and do what it does."""
        if self._replica.follow():
            self.stats.num_steps += 1
        return []
