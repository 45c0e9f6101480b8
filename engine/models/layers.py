"""What layer parts are built from: fused projections, and the rotary frequencies of the rope types that models use.

Rotary formulas as in transformers' modeling_rope_utils. Knows no layers; the operations themselves are kernels'.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models import WeightSource
from engine.models.spec import RopeSpec
from kernels.api import Kernels


def pack_fused(source: WeightSource, kernels: Kernels, modules: Sequence[str], *, has_bias: bool = False) -> Any:
    """Pack linear modules of one input as a single projection whose outputs follow each other."""
    weight = torch.cat([source.get(f"{module}.weight") for module in modules])
    bias = torch.cat([source.get(f"{module}.bias") for module in modules]) if has_bias else None
    return kernels.pack_weight(weight, bias)


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
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


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
