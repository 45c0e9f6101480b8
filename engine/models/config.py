"""What specs read config.json with: numbers that must be there, and the rotary embedding. Knows no architectures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import ModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base and scaling, in the names of config.json; lengths in tokens."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # yarn: None means 0.1 ln(factor) + 1
    truncate: bool = True  # yarn: round the bounds of the ramp
    mscale: float = 0.0  # yarn in DeepSeek's models: numerator of the attention factor, if both are set ...
    mscale_all_dim: float = 0.0  # ... and its denominator, which scales the softmax instead

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "RopeSpec":
        """Read rope_parameters (transformers 5), or rope_theta and rope_scaling; an unknown one is a ModelError."""
        values = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
        values.pop("type", None)
        theta = values.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        if kind not in ROPE_TYPES:
            raise ModelError(f"config.json: rope type {kind!r} is not implemented; known: {', '.join(ROPE_TYPES)}")
        known = {name: values.pop(name) for name in _ROPE_FIELDS[kind] if values.get(name) is not None}
        original = values.pop("original_max_position_embeddings", None) or config.get("max_position_embeddings") or 0
        for name, value in values.items():
            if value not in (None, 1.0 if name in ("partial_rotary_factor", "factor") else None):
                raise ModelError(f"config.json: rope field {name}={value!r} is not implemented for rope type {kind!r}")
        return cls(theta=float(theta), kind=kind, original_max_positions=int(original), **known)


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim"),
}


def count(config: Mapping[str, Any], name: str) -> int:
    """Read a positive number. Raises ModelError."""
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value
