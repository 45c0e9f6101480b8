"""What a block drafter is, read from the config.json that DeepSpec writes (DSpark, arXiv:2607.05147). Knows no tensors.

Its layers are those of a Qwen3 decoder; the fields beside these say what they read of their target and which heads
choose the tokens. A field that is not understood is a ModelError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.models.config import count
from engine.models.spec import ModelSpec
from schemas.errors import ModelError

ARCHITECTURE = "Qwen3DSparkModel"
EMBEDDING_OUTPUT = -1
"""In ``target_layer_ids``: what the embedding gives, before the first layer."""

_FIELDS = frozenset({
    "num_target_layers", "block_size", "mask_token_id", "target_layer_ids", "num_anchors", "enable_confidence_head",
    "confidence_head_with_markov", "markov_rank", "markov_head_type",
})  # fmt: skip


class MarkovKind(StrEnum):
    """How the token before a place changes the logits there."""

    NONE = "none"  # not at all: DFlash
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


@dataclass(frozen=True)
class BlockSpec:
    """The shape of a drafter that guesses ``block_size`` tokens in one pass."""

    layers: ModelSpec
    block_size: int
    mask_token_id: int  # stands for each token of a block but the first, which is known
    target_layer_ids: tuple[int, ...]  # ascending: whose outputs the drafter reads
    markov: MarkovKind
    markov_rank: int
    has_confidence: bool
    confidence_reads_token: bool  # the embedding of the token before, beside the state

    @classmethod
    def from_config(cls, config: Mapping[str, Any], target: ModelSpec) -> BlockSpec:
        """Read the config.json of a drafter for ``target``. Raises ModelError: what is missing or does not fit."""
        if config.get("architectures") != [ARCHITECTURE]:
            raise ModelError(
                f"architectures {config.get('architectures')!r} is no draft model that is implemented, only "
                f"[{ARCHITECTURE!r}]"
            )
        layers = ModelSpec.from_config({name: value for name, value in config.items() if name not in _FIELDS})
        rank = int(config.get("markov_rank") or 0)
        has_confidence = bool(config.get("enable_confidence_head"))
        spec = cls(
            layers=layers,
            block_size=count(config, "block_size"),
            mask_token_id=count(config, "mask_token_id"),
            target_layer_ids=_layer_ids(config, target),
            markov=_markov(config) if rank else MarkovKind.NONE,
            markov_rank=rank,
            has_confidence=has_confidence,
            confidence_reads_token=has_confidence and bool(config.get("confidence_head_with_markov")),
        )
        spec._check(config, target)
        return spec

    def _check(self, config: Mapping[str, Any], target: ModelSpec) -> None:
        sizes = {
            "vocab_size": (self.layers.vocab_size, target.vocab_size),
            "hidden_size": (self.layers.hidden_size, target.hidden_size),
            "num_target_layers": (config.get("num_target_layers", target.num_layers), target.num_layers),
        }
        for name, (mine, theirs) in sizes.items():
            if mine != theirs:
                raise ModelError(f"config.json: {name} {mine} of a draft model for another model than one of {theirs}")
        if any(window is not None for window in self.layers.layer_windows):
            raise ModelError("config.json: a draft model with sliding attention is not implemented")
        if self.mask_token_id >= target.vocab_size:
            raise ModelError(f"config.json: mask_token_id {self.mask_token_id} is not in {target.vocab_size} tokens")
        if self.confidence_reads_token and self.markov is MarkovKind.NONE:
            raise ModelError("config.json: confidence_head_with_markov needs a markov_rank above 0")


def _markov(config: Mapping[str, Any]) -> MarkovKind:
    kind = config.get("markov_head_type")
    known = [kind.value for kind in MarkovKind if kind is not MarkovKind.NONE]
    if kind not in known:
        raise ModelError(f"config.json: markov_head_type {kind!r} is not implemented; known: {', '.join(known)}")
    return MarkovKind(kind)


def _layer_ids(config: Mapping[str, Any], target: ModelSpec) -> tuple[int, ...]:
    """All but the last layer, whose output reaches transformers' callers behind the final norm."""
    ids = config.get("target_layer_ids")
    inner = range(EMBEDDING_OUTPUT, target.num_layers - 1)
    if not isinstance(ids, list) or not ids or ids != sorted(set(ids)) or not set(ids) <= set(inner):
        raise ModelError(
            f"config.json: target_layer_ids must be ascending numbers from {inner.start} to {inner.stop - 1}, "
            f"not {ids!r}"
        )
    return tuple(ids)
