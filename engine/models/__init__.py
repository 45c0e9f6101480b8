"""Native model code: flat rows in, hidden states out. Knows no requests and no schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.batch import StepBatch
    from engine.expert_balance import ExpertBalance
    from engine.models.block_drafter import BlockDrafter
    from engine.models.predictor import Predictor
    from engine.models.spec import ModelSpec
    from engine.shards import Part

    KVCache = list[Tensor]
    """One tensor a layer, of blocks; only the model looks inside."""


class Model(Protocol):
    """What the runner needs of a model."""

    spec: ModelSpec
    is_recordable: bool
    """Whether a CUDA graph can hold a decode step."""
    shares_prefixes: bool
    """Whether decode rows that share a prefix read it once, if the batch names it."""
    block_size: int
    """Tokens of a cache block that attention is fastest with."""
    max_mixed_rows: int
    """Rows of the largest step of any runs that one can hold too, and is faster with; 0: none."""

    expert_balance: ExpertBalance | None
    """What is told when a step has ended, where ranks share experts that may move."""

    predictor: Predictor | None
    """Guesses the token after the next, where it was loaded; its cache is the last one."""

    block_drafter: BlockDrafter | None
    """Guesses blocks of tokens, where one was loaded; its caches are the last ones."""

    def alloc_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Allocate a zeroed cache on the model's device. Raises RuntimeError or MemoryError if it does not fit."""
        ...

    def cache_bytes_per_block(self, block_size: int) -> int:
        """Bytes that one block of ``block_size`` tokens takes over all layers."""
        ...

    def forward(self, batch: StepBatch, cache: KVCache) -> Tensor:
        """Run all rows, write what later rows read of them; return final-normed states of logits_rows [L, hidden].

        With a predictor, which is made of them, of all rows: [N, hidden].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Project ``hidden`` [L, hidden] to float32 logits [L, vocab_size]."""
        ...


class WeightSource(Protocol):
    """Named weights on the model's device."""

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part | None = None) -> Tensor:
        """Return the tensor of that Hugging Face name in ``dtype``, else the model's. ModelError if it is absent.

        Of a ``part``, the rest is not read.
        """
        ...

    def leave(self, prefix: str) -> None:
        """Note that other ranks take the tensors whose names begin with ``prefix``, an expert's."""
        ...
