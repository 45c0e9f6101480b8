"""Masks of a batch: a table of them lies on the device, and a batch names its rows there.

The masks of shared states stay in the table, those of states that one row is in go behind them for one step. Knows no
grammar engine: native matchers are filled by the function that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.states import ALLOWS_ALL, ALLOWS_NONE, NO_ROW, SharedMatcher, State
from engine.types import Matcher

TABLE_BYTES = 2**27  # more where a batch needs them

FillNative = Callable[[list[Matcher], Tensor], None]
"""Write the masks of native matchers into int32 [L, words] on the host, one row each."""


class Masks(NamedTuple):
    """What a batch may draw: ``bits`` int32 [R, W] on the device, of which row l of the batch has row ``rows[l]``."""

    bits: Tensor
    rows: Tensor  # int32 [L]


class MaskTable:
    """The masks of one engine's states. Full, it is emptied: what is needed comes back."""

    def __init__(self, num_tokens: int, num_mask_words: int, device: torch.device, fill_native: FillNative) -> None:
        """``num_tokens`` are the tokenizer's; the tokens of a model beyond them are allowed only to free rows."""
        self._num_words = -(-num_tokens // 32)
        self._last_word = np.uint32(2 ** ((num_tokens - 1) % 32 + 1) - 1).astype(np.int32).item()
        self._num_mask_words = num_mask_words
        self._num_rows = TABLE_BYTES // (4 * num_mask_words)
        self._device = device
        self._fill_native = fill_native
        self._bits: Tensor | None = None
        self._kept: list[State] = []  # behind the rows that allow all and nothing

    def fill(self, matchers: Seq[SharedMatcher | None]) -> Masks | None:
        """Masks of the next token, all ones where a row is free; None if all are. Good until the next call."""
        if not any(matchers):
            return None
        if self._num_used + len(matchers) > self._num_rows:
            self._empty()
        if self._num_used + len(matchers) > self._num_rows:
            self._num_rows, self._bits = self._num_used + len(matchers), None
        if self._bits is None:
            self._bits = torch.zeros(self._num_rows, self._num_mask_words, dtype=torch.int32, device=self._device)
            self._bits[ALLOWS_ALL] = -1
        rows = [matcher.state.row if matcher else ALLOWS_ALL for matcher in matchers]
        first = self._num_used
        arrays = {"new": self._find(matchers, rows)} if NO_ROW in rows else {}
        moved = to_device({"rows": np.array(rows, dtype=np.int32), **arrays}, self._device)
        if arrays:
            self._bits[first : first + len(moved["new"]), : self._num_words] = moved["new"]
        return Masks(self._bits, moved["rows"])

    @property
    def _num_used(self) -> int:
        return ALLOWS_NONE + 1 + len(self._kept)

    def _find(self, matchers: Seq[SharedMatcher | None], rows: list[int]) -> np.ndarray:
        """The masks that come behind those of the table, int32 [N, words]; ``rows`` learns where they will be."""
        first = len(self._kept)
        shared: list[Matcher] = []
        alone: dict[int, Matcher] = {}  # by row of the batch
        for row, matcher in enumerate(matchers):
            if matcher is None or rows[row] != NO_ROW:
                continue
            if matcher.state.row == NO_ROW and (native := matcher.native):
                if matcher.state.is_kept:
                    matcher.state.row = self._num_used
                    self._kept.append(matcher.state)
                    shared.append(native)
                else:
                    alone[row] = native
            rows[row] = matcher.state.row
        for place, row in enumerate(alone, self._num_used):
            rows[row] = place
        found = np.zeros((len(shared) + len(alone), self._num_words), dtype=np.int32)
        self._fill_native([*shared, *alone.values()], torch.from_numpy(found))
        found[:, -1] &= self._last_word
        for state, bits in zip(self._kept[first:], found, strict=False):
            state.allowed = bits.tobytes()
            if state.way:
                state.is_spelled = state.way.narrow(bits)
        return found

    def _empty(self) -> None:
        for state in self._kept:
            state.row, state.allowed = NO_ROW, None
        self._kept.clear()
