"""Masks of a batch: those of shared states are kept on the device and gathered, the others are sent.

Knows no grammar engine: native matchers are filled by the function that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.device import to_device
from engine.states import MIN_VISITS, SharedMatcher, Spot
from engine.types import Matcher

TABLE_BYTES = 2**27
MIN_ROWS = 1024  # more than sequences in a batch, whatever the vocabulary
ALLOWS_ALL = 0

FillNative = Callable[[list[Matcher], Tensor], None]
"""Write the masks of native matchers into int32 [L, words] on the host, one row each."""


class MaskTable:
    """int32 [rows, W] on the device; row 0 allows everything. Full, it is emptied: what is needed comes back."""

    def __init__(self, num_tokens: int, num_mask_words: int, device: torch.device, fill_native: FillNative) -> None:
        """``num_tokens`` are the tokenizer's; the tokens of a model beyond them are allowed only to free rows."""
        self._num_words = -(-num_tokens // 32)
        self._last_word = np.uint32(2 ** ((num_tokens - 1) % 32 + 1) - 1).astype(np.int32).item()
        self._num_mask_words = num_mask_words
        self._num_rows = max(MIN_ROWS, TABLE_BYTES // (4 * num_mask_words))
        self._device = device
        self._fill_native = fill_native
        self._table: Tensor | None = None
        self._kept: list[Spot] = []  # of row i + 1

    def fill(self, matchers: Seq[SharedMatcher | None]) -> Tensor | None:
        """Masks of the next token, int32 [L, W] on the device, all ones where a row is free; None if all are."""
        if not any(matchers):
            return None
        if len(self._kept) + len(matchers) >= self._num_rows:
            self._empty()
        rows = np.full(len(matchers), ALLOWS_ALL, dtype=np.int64)
        num_kept = len(self._kept)
        new: list[Matcher] = []
        sent: dict[int, Matcher] = {}  # by row of the batch
        for row, matcher in enumerate(matchers):
            if matcher is None:
                continue
            spot = matcher.spot()
            if spot is None or (spot.mask == 0 and spot.num_visits < MIN_VISITS):
                sent[row] = matcher.native
                continue
            if spot.mask == 0:
                self._kept.append(spot)
                spot.mask = len(self._kept)
                new.append(matcher.native)
            rows[row] = spot.mask
        return self._gather(rows, num_kept, new, sent)

    def _gather(self, rows: np.ndarray, num_kept: int, new: list[Matcher], sent: dict[int, Matcher]) -> Tensor:
        if self._table is None:
            self._table = torch.zeros(self._num_rows, self._num_mask_words, dtype=torch.int32, device=self._device)
            self._table[ALLOWS_ALL] = -1
        natives = [*new, *sent.values()]
        filled = torch.empty((len(natives), self._num_words), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        if natives:
            self._fill_native(natives, filled)
            filled[:, -1] &= self._last_word
            filled = filled.to(self._device, non_blocking=True)
        self._table[num_kept + 1 : num_kept + 1 + len(new), : self._num_words] = filled[: len(new)]
        places = to_device({"rows": rows, "sent": np.fromiter(sent, np.int64, len(sent))}, self._device)
        masks = self._table[places["rows"]]
        if sent:
            masks[places["sent"]] = 0
            masks[places["sent"], : self._num_words] = filled[len(new) :]
        return masks

    def _empty(self) -> None:
        for spot in self._kept:
            spot.mask = 0
        self._kept.clear()
