"""What layer parts are built from: fused projections, and the rotary frequencies of the rope types that models use.

Rotary formulas as in transformers' modeling_rope_utils. Knows no layers; the operations themselves are kernels'.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.models import WeightSource
from engine.models.config import RopeSpec
from kernels.api import Kernels


class Linear(NamedTuple):
    """A linear module's weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


def load_linear(source: WeightSource, module: str, *, has_bias: bool = False) -> Linear:
    """Read the linear module of that name."""
    return Linear(source.get(f"{module}.weight"), source.get(f"{module}.bias") if has_bias else None)


def pack_fused(kernels: Kernels, linears: Sequence[Linear]) -> Any:
    """Pack linear modules of one input as a single projection whose outputs follow each other."""
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return kernels.pack_projection(weight)
    zero = weight.new_zeros(1)
    biases = [zero.expand(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
    return kernels.pack_projection(weight, torch.cat(biases))


class Rotary:
    """Cosines and sines of any positions, computed in fp32 once a step for all layers."""

    def __init__(self, rope: RopeSpec, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = attention_scale(rope)
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``positions`` int64 [N] -> cos, sin [N, D] in the model's dtype; both halves of D hold the same angles."""
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scale).to(self._dtype), (angles.sin() * self._scale).to(self._dtype)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians per position of each pair of a head's dimensions: fp32 [D / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def attention_scale(rope: RopeSpec) -> float:
    """Factor on cosines and sines; only yarn has one (section 3.4 of arXiv:2309.00071)."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
    return _yarn_scale(rope.factor, 1.0)


def softmax_scale(rope: RopeSpec, query_size: int) -> float:
    """Factor on the scores of latent attention; DeepSeek's yarn puts part of its attention factor here."""
    scale = query_size**-0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        return scale * _yarn_scale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Divide low frequencies by ``factor``, keep high ones, blend in between (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_positions / wavelengths
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeSpec, frequencies: Tensor, head_dim: int) -> Tensor:
    """Blend scaled and unscaled frequencies over a ramp of dimensions (arXiv:2309.00071)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
