"""Manifold-constrained hyper-connections of DeepSeek V4: several residual streams, mixed before and after each part.

Shape legend: N rows, S streams. All in fp32. Knows no attention and no experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.models import WeightSource
from engine.models.compressed_spec import HyperSpec
from kernels.api import Kernels


class Mix(NamedTuple):
    """How a row's streams go on past a part of a layer."""

    post: Tensor  # [N, S]: how much of the part's output each stream takes
    streams: Tensor  # [N, S, S]: doubly stochastic; stream j's share of the new stream k


class HyperConnection:
    """Around one part of a layer: what it reads of the streams, and how they take up what it returns."""

    def __init__(self, spec: HyperSpec, eps: float, source: WeightSource, kernels: Kernels, name: str) -> None:
        self._spec, self._eps, self._kernels = spec, eps, kernels
        self._weight, self._base, self._scale = (
            source.get(f"{name}_{part}", torch.float32) for part in ("fn", "base", "scale")
        )

    def enter(self, streams: Tensor) -> tuple[Tensor, Mix]:
        """Streams [N, S, hidden] -> the part's input [N, hidden] in their dtype, and the mix for ``leave``."""
        size, eps = self._spec.num_streams, self._spec.eps
        flat = streams.flatten(1).float()
        mixed = functional.linear(functional.rms_norm(flat, flat.shape[1:], eps=self._eps), self._weight)
        sizes = [size, size, size * size]
        pre, post, among = (
            part * scale + base
            for part, scale, base in zip(mixed.split(sizes, 1), self._scale, self._base.split(sizes), strict=True)
        )
        among = self._kernels.sinkhorn(among.unflatten(1, (size, size)), self._spec.num_iterations, eps)
        mix = Mix(2 * post.sigmoid(), among)
        return ((pre.sigmoid() + eps)[..., None] * streams.float()).sum(dim=1).to(streams.dtype), mix

    @staticmethod
    def leave(streams: Tensor, update: Tensor, mix: Mix) -> Tensor:
        """The streams [N, S, hidden] after the part returned ``update`` [N, hidden]."""
        kept = torch.bmm(mix.streams.mT, streams.float())
        return (kept + mix.post[..., None] * update[:, None].float()).to(streams.dtype)


class HyperHead:
    """Adds the streams up before the final norm."""

    def __init__(self, spec: HyperSpec, eps: float, source: WeightSource) -> None:
        self._spec, self._eps = spec, eps
        self._weight, self._base, self._scale = (
            source.get(f"hc_head_{part}", torch.float32) for part in ("fn", "base", "scale")
        )

    def __call__(self, streams: Tensor) -> Tensor:
        """Streams [N, S, hidden] -> [N, hidden]."""
        flat = streams.flatten(1).float()
        mixed = functional.linear(functional.rms_norm(flat, flat.shape[1:], eps=self._eps), self._weight)
        pre = (mixed * self._scale + self._base).sigmoid() + self._spec.eps
        return (pre[..., None] * streams.float()).sum(dim=1).to(streams.dtype)
