"""Tensor parallelism: which part of a dense decoder's weights a rank holds (Megatron-LM, arXiv:1909.08053).

Attention is divided by heads and the feed-forward part by inner values: the projections into them by rows, those out of
them by columns, whose results are summed up over ranks. Knows names, not files.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.dist import Group
from engine.models import WeightSource
from engine.models.spec import ModelSpec

_BY_ROWS = re.compile(r".*\.(q|k|v|gate|up)_proj\.(weight|bias)")
_BY_COLUMNS = re.compile(r".*\.(o|down)_proj\.weight")
_ONCE = re.compile(r".*\.(o|down)_proj\.bias")
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """The ``index``-th of ``count`` equal parts of a tensor along ``dim``."""

    dim: int
    index: int
    count: int

    def of(self, size: int) -> slice:
        """Where it lies in a dimension of ``size``."""
        length = size // self.count
        return slice(self.index * length, (self.index + 1) * length)


def shard_spec(spec: ModelSpec, count: int) -> ModelSpec:
    """The shape of one rank's layers."""
    return replace(
        spec,
        num_heads=spec.num_heads // count,
        num_kv_heads=spec.num_kv_heads // count,
        intermediate_size=spec.intermediate_size // count,
    )


def head_part(vocab_size: int, ranks: Group) -> slice:
    """Rows of the head that a rank holds: all where they do not divide evenly."""
    return slice(vocab_size) if vocab_size % ranks.size else Part(0, ranks.index, ranks.size).of(vocab_size)


class ShardedWeights:
    """The WeightSource of one of ``ranks``; norms and the embedding are whole on all of them."""

    def __init__(self, source: WeightSource, spec: ModelSpec, ranks: Group) -> None:
        self._source, self._index, self._count = source, ranks.index, ranks.size
        self._head_is_divided = spec.vocab_size % ranks.size == 0

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part | None = None) -> Tensor:
        """See WeightSource.get."""
        assert part is None, "a part of a part is nobody's"
        if _BY_ROWS.fullmatch(name) or (name == HEAD and self._head_is_divided):
            return self._source.get(name, dtype, Part(0, self._index, self._count))
        if _BY_COLUMNS.fullmatch(name):
            return self._source.get(name, dtype, Part(1, self._index, self._count))
        tensor = self._source.get(name, dtype)
        if _ONCE.fullmatch(name) and self._index:
            return torch.zeros_like(tensor)  # the sum over ranks adds it once
        return tensor

    def leave(self, prefix: str) -> None:
        """See WeightSource.leave."""
        self._source.leave(prefix)


def cut(tensor: Any, part: Part | None) -> Tensor:
    """Return a part of a tensor, or of a slice of safetensors."""
    if part is None:
        return tensor  # type: ignore[no-any-return]
    shape = tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape()
    index = [slice(None)] * part.dim + [part.of(shape[part.dim])]
    return tensor[tuple(index)].contiguous()  # type: ignore[no-any-return]
