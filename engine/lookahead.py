"""Drafts by the model's own predictor: a token for each draw of a step, then one more a pass.

What it leaves in its cache for tokens that are not drawn is overwritten by the step that computes the right ones. A
wrong guess costs a row and changes nothing. Knows no grammar and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.device import ToHost, to_device
from engine.models import Model
from engine.runner import Runner, build_batch, lay_out, size_of
from engine.types import Ids, Run, Sequence


class Ahead(NamedTuple):
    """For each draw of a step: the token guessed after it, and the state that the next guess is made of."""

    token_ids: Tensor  # int64 [L]
    states: Tensor  # [L, hidden]


class Lookahead:
    """Runs the predictor of a model behind its steps."""

    def __init__(self, model: Model, runner: Runner, block_size: int) -> None:
        assert model.predictor is not None, "the model has a predictor"
        self._model, self._predictor, self._runner = model, model.predictor, runner
        self._block_size = block_size

    @torch.inference_mode()
    def follow(self, runs: Seq[Run], drawn: Tensor | None) -> Ahead:
        """Launch the guesses after the draws ``drawn`` int64 [L] of the runner's last step, which had ``runs``."""
        assert self._runner.last is not None, "a step was run"
        batch, states = self._runner.last
        following = to_device({"ids": _following(runs)}, self._runner.device)["ids"]
        if drawn is not None:
            following[batch.logits_rows] = drawn.clamp(min=0)
        return self._guess(following, states, batch)

    @torch.inference_mode()
    def chain(self, ahead: Ahead, places: Seq[tuple[Sequence, int]], num_tokens: int) -> list[Ids]:
        """Guess ``num_tokens`` after the last token of each sequence, which was the draw of that row of ``ahead``.

        The sequences have blocks for them. Waits for the device.
        """
        rows = to_device({"rows": np.array([row for _, row in places], dtype=np.int64)}, self._runner.device)["rows"]
        last = Ahead(ahead.token_ids[rows], ahead.states[rows])
        guessed = [last.token_ids]
        for offset in range(num_tokens - 1):
            arrays = lay_out([Run(s, len(s.token_ids) - 1 + offset, 1, True) for s, _ in places], self._block_size)
            batch = build_batch(arrays, size_of(arrays), self._runner.device, None)
            last = self._guess(last.token_ids, last.states, batch)
            guessed.append(last.token_ids)
        return [tuple(map(int, ids)) for ids in ToHost(torch.stack(guessed, dim=1)).read()]

    def _guess(self, following: Tensor, states: Tensor, batch: StepBatch) -> Ahead:
        hidden, states = self._predictor(following, states, batch, self._runner.cache[-1])
        return Ahead(self._model.logits(hidden).argmax(dim=-1), states)


def _following(runs: Seq[Run]) -> np.ndarray:
    """The token after each row's, int64 [N]; 0 after a sequence's last one, which is drawn."""
    found: list[int] = []
    for run in runs:
        known = (*run.sequence.token_ids[run.start + 1 : run.start + run.num_tokens + 1], *run.draft.token_ids)
        found += (*known[: run.num_rows], *[0] * (run.num_rows - len(known)))
    return np.array(found, dtype=np.int64)
