"""Draws the next token of each sequence: penalty, grammar mask, then the kernels' filters and draw.

A row's draw depends on its own logits, seed and output position only, never on its neighbours. Knows no text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.device import ToHost, to_device
from engine.masks import Masks
from engine.types import Ids, Sequence
from kernels.api import Kernels, SamplingBatch


class Sampler:
    """Applies requests' sampling parameters to a batch of logits."""

    def __init__(self, kernels: Kernels, device: torch.device) -> None:
        self._kernels = kernels
        self._device = device

    @torch.inference_mode()
    def sample(
        self, logits: Tensor, sequences: Seq[Sequence], masks: Masks | None, ahead: Seq[Ids] | None = None
    ) -> Draw:
        """Launch the draw of a token for each row of float32 ``logits`` [L, V], which is overwritten.

        ``ahead``: for each row the draft that stands between its sequence and the token drawn; None without drafts.
        """
        ahead = ahead or [()] * len(sequences)
        apply_repetition_penalty(logits, sequences, ahead)
        if masks is not None:
            self._kernels.apply_token_bitmask(logits, *masks)
        golden = find_golden(logits, sequences, ahead)
        tokens, logprobs = self._kernels.sample(logits, build_sampling_batch(sequences, ahead, self._device))
        if golden is not None:
            rows, golden_tokens, golden_logprobs = golden
            tokens[rows], logprobs[rows] = golden_tokens, golden_logprobs
        return Draw(tokens, logprobs)


class Draw:
    """Tokens int64 [L] on the device, and on their way to the host with their log-probabilities."""

    def __init__(self, tokens: Tensor, logprobs: Tensor) -> None:
        self.tokens = tokens
        self._pairs = ToHost(torch.stack((tokens.double(), logprobs.double())))  # ids are exact in a double

    def read(self) -> list[tuple[int, float]]:
        """Wait for the tokens and their log-probabilities. Token -1: none is allowed."""
        return [(int(token), logprob) for token, logprob in zip(*self._pairs.read(), strict=True)]


def build_sampling_batch(sequences: Seq[Sequence], ahead: Seq[Ids], device: torch.device) -> SamplingBatch:
    """Gather the sequences' parameters; a filter that none of them uses is left out."""
    sampling = [sequence.request.sampling for sequence in sequences]
    places = [sequence.num_drawn + len(ids) for sequence, ids in zip(sequences, ahead, strict=True)]
    integers = {
        "seeds": np.array([sequence.request.seed for sequence in sequences], dtype=np.int64),
        "positions": np.array(places, dtype=np.int64),
    }
    floats = {"temperature": np.array([s.temperature for s in sampling], dtype=np.float32)}
    is_all_greedy = not floats["temperature"].any()
    if not is_all_greedy:
        if any(s.top_k for s in sampling):
            integers["top_k"] = np.array([s.top_k for s in sampling], dtype=np.int64)
        if any(s.top_p < 1 for s in sampling):
            floats["top_p"] = np.array([s.top_p for s in sampling], dtype=np.float32)
        if any(s.min_p for s in sampling):
            floats["min_p"] = np.array([s.min_p for s in sampling], dtype=np.float32)
    tensors = to_device(integers, device) | to_device(floats, device)
    return SamplingBatch(**tensors, is_all_greedy=is_all_greedy)


def find_golden(logits: Tensor, sequences: Seq[Sequence], ahead: Seq[Ids]) -> tuple[Tensor, Tensor, Tensor] | None:
    """Rows whose output is given, their next tokens, and the log-probabilities of these; None without such rows."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.golden_token_ids]
    if not rows:
        return None
    places = [sequences[row].num_drawn + len(ahead[row]) for row in rows]
    tokens = [sequences[row].request.golden_token_ids[place] for row, place in zip(rows, places, strict=True)]
    golden = to_device({"rows": np.array(rows), "tokens": np.array(tokens)}, logits.device)
    logprobs = logits[golden["rows"]].log_softmax(dim=-1)
    return golden["rows"], golden["tokens"], logprobs.gather(1, golden["tokens"][:, None])[:, 0]


def apply_repetition_penalty(logits: Tensor, sequences: Seq[Sequence], ahead: Seq[Ids]) -> None:
    """Divide positive logits of tokens so far by the penalty, multiply negative ones (CTRL, eq. 3.2)."""
    rows, columns, penalties = [], [], []
    for row, sequence in enumerate(sequences):
        penalty = sequence.request.sampling.repetition_penalty
        if penalty != 1.0:
            so_far = np.frombuffer(sequence.token_ids, dtype=np.int64)
            seen = np.unique(np.concatenate((so_far, np.array(ahead[row], dtype=np.int64))))
            rows.append(np.full(seen.size, row, dtype=np.int64))
            columns.append(seen)
            penalties.append(np.full(seen.size, penalty, dtype=np.float32))
    if not rows:
        return
    indices = to_device({"row": np.concatenate(rows), "column": np.concatenate(columns)}, logits.device)
    penalty_tensor = to_device({"penalty": np.concatenate(penalties)}, logits.device)["penalty"]
    values = logits[indices["row"], indices["column"]]
    scaled = torch.where(values > 0, values / penalty_tensor, values * penalty_tensor)
    logits[indices["row"], indices["column"]] = scaled
