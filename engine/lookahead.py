"""Drafts by a part of the model made for it, after each step: a predictor, token by token, or a drafter, in blocks.

What they leave in their caches for tokens that are not drawn is overwritten by the step that computes the right ones. A
wrong guess costs a row and changes nothing. Knows no grammar and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.device import ToHost, to_device
from engine.models import Model
from engine.models.block_drafter import BlockDrafter
from engine.models.predictor import Predictor
from engine.runner import Runner, build_batch, lay_out, lay_out_blocks, size_of
from engine.types import Ids, Run, Sequence

MAX_ROWS = 1024
"""Of blocks that are computed at once: each row has logits, and memory is planned for those of a step."""


class Ahead(NamedTuple):
    """For each draw of a step: the token guessed after it, and the state that the next guess is made of."""

    token_ids: Tensor  # int64 [L]
    states: Tensor  # [L, hidden]


class Foreseen(NamedTuple):
    """Tokens guessed to follow a sequence, and the chance of each if those before are right; () if it is unknown."""

    token_ids: Ids
    chances: tuple[float, ...] = ()


Place = tuple[Sequence, int]
"""A sequence whose last token was the draw of that row of the last step."""


class Lookahead(Protocol):
    """Guesses what follows the draws of a model's steps."""

    def num_slots(self, num_tokens: int) -> int:
        """Tokens behind those of a sequence that a guess of ``num_tokens`` needs cache blocks for."""

    def follow(self, runs: Seq[Run], drawn: Tensor | None) -> Ahead | None:
        """Launch what there is to compute after the runner's last step, of ``runs``, which drew ``drawn`` int64 [L]."""

    def guess(self, ahead: Ahead | None, places: Seq[Place], num_tokens: int) -> list[Foreseen]:
        """Guess up to ``num_tokens`` for each place; ``ahead`` is of the step that drew there. Waits for the device.

        The sequences have blocks for ``num_slots`` more.
        """


def make_lookahead(model: Model, runner: Runner, block_size: int) -> Lookahead | None:
    """What a model has for it, if anything: a drafter is there because somebody asked for it."""
    if model.block_drafter:
        return BlockLookahead(model, model.block_drafter, runner, block_size)
    return ChainLookahead(model, model.predictor, runner, block_size) if model.predictor else None


class ChainLookahead:
    """Runs the predictor of a model: a token for each draw of a step, then one more a pass."""

    def __init__(self, model: Model, predictor: Predictor, runner: Runner, block_size: int) -> None:
        self._model, self._predictor, self._runner = model, predictor, runner
        self._block_size = block_size

    def num_slots(self, num_tokens: int) -> int:
        """See Lookahead.num_slots."""
        return num_tokens

    @torch.inference_mode()
    def follow(self, runs: Seq[Run], drawn: Tensor | None) -> Ahead:
        """See Lookahead.follow; the predictor's cache is made of the drawn tokens too."""
        assert self._runner.last is not None, "a step was run"
        batch, states = self._runner.last
        following = to_device({"ids": _following(runs)}, self._runner.device)["ids"]
        if drawn is not None:
            following[batch.logits_rows] = drawn.clamp(min=0)
        return self._predict(following, states, batch)

    @torch.inference_mode()
    def guess(self, ahead: Ahead | None, places: Seq[Place], num_tokens: int) -> list[Foreseen]:
        """See Lookahead.guess."""
        assert ahead is not None, "the step was followed"
        rows = to_device({"rows": np.array([row for _, row in places], dtype=np.int64)}, self._runner.device)["rows"]
        last = Ahead(ahead.token_ids[rows], ahead.states[rows])
        guessed = [last.token_ids]
        for offset in range(num_tokens - 1):
            arrays = lay_out([Run(s, len(s.token_ids) - 1 + offset, 1, True) for s, _ in places], self._block_size)
            batch = build_batch(arrays, size_of(arrays), self._runner.device, None)
            last = self._predict(last.token_ids, last.states, batch)
            guessed.append(last.token_ids)
        return [Foreseen(tuple(ids)) for ids in ToHost(torch.stack(guessed, dim=1)).read()]

    def _predict(self, following: Tensor, states: Tensor, batch: StepBatch) -> Ahead:
        hidden, states = self._predictor(following, states, batch, self._runner.cache[-1])
        return Ahead(self._model.logits(hidden).argmax(dim=-1), states)


class BlockLookahead:
    """Runs a model's drafter, whose caches the model's own steps fill: one pass for all tokens of a guess."""

    def __init__(self, model: Model, drafter: BlockDrafter, runner: Runner, block_size: int) -> None:
        self._model, self._drafter, self._runner, self._block_size = model, drafter, runner, block_size
        self._caches = runner.cache[-len(drafter.layers) :]

    def num_slots(self, num_tokens: int) -> int:
        """See Lookahead.num_slots: a block is computed as a whole."""
        return self._drafter.spec.block_size

    def follow(self, runs: Seq[Run], drawn: Tensor | None) -> None:
        """See Lookahead.follow: nothing is left to compute."""

    @torch.inference_mode()
    def guess(self, ahead: Ahead | None, places: Seq[Place], num_tokens: int) -> list[Foreseen]:
        """See Lookahead.guess: a block is computed as a whole, as the drafter was trained, and cut."""
        sequences, found = [sequence for sequence, _ in places], []
        num_blocks = max(1, MAX_ROWS // self._drafter.spec.block_size)
        for start in range(0, len(sequences), num_blocks):
            found += self._guess(sequences[start : start + num_blocks], num_tokens)
        return found

    def _guess(self, sequences: Seq[Sequence], num_tokens: int) -> list[Foreseen]:
        spec = self._drafter.spec
        arrays = lay_out_blocks(sequences, spec.block_size, self._block_size, spec.mask_token_id)
        batch = build_batch(arrays, size_of(arrays), self._runner.device, None)
        hidden = self._drafter(batch, self._caches)
        by_block = (len(sequences), spec.block_size, -1)
        logits, first_ids = self._model.logits(hidden).view(by_block), batch.input_ids[:: spec.block_size]
        token_ids, chances = self._drafter.choose(hidden.view(by_block), logits, first_ids)
        guesses = [tuple(ids[:num_tokens]) for ids in ToHost(token_ids).read()]
        if chances is None:
            return list(map(Foreseen, guesses))
        return [
            Foreseen(ids, tuple(each[:num_tokens])) for ids, each in zip(guesses, ToHost(chances).read(), strict=True)
        ]


def _following(runs: Seq[Run]) -> np.ndarray:
    """The token after each row's, int64 [N]; 0 after a sequence's last one, which is drawn."""
    found: list[int] = []
    for run in runs:
        known = (*run.sequence.token_ids[run.start + 1 : run.start + run.num_tokens + 1], *run.draft.token_ids)
        found += (*known[: run.num_rows], *[0] * (run.num_rows - len(known)))
    return np.array(found, dtype=np.int64)
