"""Carries a step out on the model: runs -> layout -> StepBatch -> hidden states -> logits. Knows no sampling."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from engine.batch import StepBatch, StepSize
from engine.device import to_device
from engine.graphs import GraphLimits, StepGraphs, fill_in
from engine.models import Model
from engine.types import Run, Sequence
from kernels.api import AttentionBatch
from schemas.errors import EngineError

MIN_SHARERS, MIN_SHARED_KEYS = 16, 128
"""Decode rows, and keys, from which on reading a shared prefix once pays for putting the parts together."""

NO_TOKEN = array("q", [0])
"""Stands for a token that is in flight."""


class Runner:
    """Owns the KV cache, and on a GPU the graphs of its smaller steps."""

    def __init__(
        self, model: Model, device: torch.device, *, num_blocks: int, block_size: int, graphs: GraphLimits | None = None
    ) -> None:
        self._model, self._block_size = model, block_size
        self.device = device
        self.last: tuple[StepBatch, Tensor] | None = None  # step, and what the model made of its rows, for a predictor
        try:
            self.cache = model.alloc_cache(num_blocks, block_size)
        except (RuntimeError, MemoryError) as error:  # torch raises a RuntimeError on either device
            size_gib = num_blocks * model.cache_bytes_per_block(block_size) / 2**30
            raise EngineError(f"no memory for a KV cache of {size_gib:.1f} GiB: lower engine.kv_cache_gib") from error
        can_record = device.type == "cuda" and model.is_recordable
        self._graphs = StepGraphs(model, self.cache, device, graphs) if graphs and can_record else None
        self.step_sizes = self._graphs.step_sizes if self._graphs else ()

    @torch.inference_mode()
    def run(self, arrays: Mapping[str, np.ndarray], size: StepSize, drawn: Tensor | None = None) -> Tensor:
        """Launch the rows that ``lay_out`` made: float32 logits [L, V] of ``logits_rows``.

        ``drawn`` int64 [L'] on the device: the tokens of the step before, for the rows whose token is still in flight.
        """
        if self._model.shares_prefixes:
            arrays = {**arrays, "shared": find_shared(arrays, self._block_size)}
        if self._graphs and (logits := self._graphs.run(arrays, size, drawn)) is not None:
            return logits
        batch = build_batch(arrays, size, self.device, drawn)
        hidden = self._model.forward(batch, self.cache)
        if self._model.predictor:
            self.last, hidden = (batch, hidden), hidden[batch.logits_rows]
        return self._model.logits(hidden)


def lay_out(runs: Seq[Run], block_size: int) -> dict[str, np.ndarray]:
    """The runs as flat rows, int64 on the host, under the names of StepBatch and AttentionBatch.

    ``sources`` is -1, or where the step before draws the row's token.
    """
    lens = np.array([run.num_rows for run in runs], dtype=np.int64)
    starts = np.array([run.start for run in runs], dtype=np.int64)
    query_starts = np.zeros(len(runs) + 1, dtype=np.int64)
    np.cumsum(lens, out=query_starts[1:])
    row_run = np.repeat(np.arange(len(runs)), lens)
    positions = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - starts, lens)
    tokens = [_tokens(run) for run in runs]
    in_flight = [index for index, known in enumerate(tokens) if not known]
    sources, block_table = np.full_like(positions, -1), _block_table([run.sequence for run in runs])
    sources[query_starts[in_flight]] = [runs[index].sequence.draw_row for index in in_flight]
    return {
        "input_ids": _concatenate(known or NO_TOKEN for known in tokens),
        "sources": sources,
        "positions": positions,
        "slots": block_table[row_run, positions // block_size] * block_size + positions % block_size,
        "logits_rows": _logits_rows(runs, query_starts),
        "block_table": block_table,
        "seq_lens": starts + lens,
        "query_starts": query_starts,
    }


def lay_out_blocks(sequences: Seq[Sequence], num_tokens: int, block_size: int, filler_id: int) -> dict[str, np.ndarray]:
    """Blocks of ``num_tokens`` as in ``lay_out``: each sequence's last token, then ``filler_id``.

    Each row is a run of its own that ends with the block, so that all rows of a block see all of it; ``places`` are
    where the rows really stand. The sequences have cache blocks for them.
    """
    starts = np.array([len(sequence.token_ids) - 1 for sequence in sequences], dtype=np.int64)
    places = np.add.outer(starts, np.arange(num_tokens)).ravel()
    input_ids = np.full((len(sequences), num_tokens), filler_id, dtype=np.int64)
    input_ids[:, 0] = [sequence.token_ids[-1] for sequence in sequences]
    table = np.repeat(_block_table(sequences), num_tokens, axis=0)
    rows = np.arange(len(places))
    seq_lens = np.repeat(starts + num_tokens, num_tokens)
    return {
        "input_ids": input_ids.ravel(),
        "places": places,
        "positions": seq_lens - 1,
        "slots": table[rows, places // block_size] * block_size + places % block_size,
        "logits_rows": rows,
        "block_table": table,
        "seq_lens": seq_lens,
        "query_starts": np.arange(len(places) + 1),
    }


def find_shared(arrays: Mapping[str, np.ndarray], block_size: int) -> np.ndarray:
    """AttentionBatch.shared of a layout: zero keys where few rows would gain, or little."""
    singles = np.flatnonzero(np.diff(arrays["query_starts"]) == 1)
    if len(singles) < MIN_SHARERS:
        return np.zeros(2, dtype=np.int64)
    table = arrays["block_table"][singles]
    num_blocks = int(np.logical_and.accumulate((table == table[0]).all(axis=0)).sum())
    num_keys = min(num_blocks * block_size, int(arrays["seq_lens"][singles].min()) - 1) // block_size * block_size
    return np.array([num_keys if num_keys >= MIN_SHARED_KEYS else 0, singles[0]], dtype=np.int64)


def size_of(arrays: Mapping[str, np.ndarray]) -> StepSize:
    """The size of a layout."""
    rows, runs = len(arrays["input_ids"]), len(arrays["seq_lens"])
    return StepSize(rows, len(arrays["logits_rows"]), rows == runs)


def build_batch(
    arrays: Mapping[str, np.ndarray], size: StepSize, device: torch.device, drawn: Tensor | None
) -> StepBatch:
    """Move a layout to the device in one transfer."""
    tensors = to_device(arrays, device)
    lens = np.diff(arrays["query_starts"])
    attention = AttentionBatch(
        slots=tensors["slots"],
        block_table=tensors["block_table"],
        seq_lens=tensors["seq_lens"],
        query_starts=tensors["query_starts"],
        positions=tensors["positions"],
        query_lens=tuple(lens.tolist()),
        host_seq_lens=tuple(arrays["seq_lens"].tolist()),
        num_decodes=int(np.cumprod(lens == 1).sum()),
        host_table=arrays["block_table"],
        shared=tensors["shared"] if "shared" in arrays and arrays["shared"][0] else None,
    )
    input_ids = tensors["input_ids"]
    if drawn is not None:
        input_ids = fill_in(input_ids, tensors["sources"], drawn)
    return StepBatch(input_ids, tensors.get("places", tensors["positions"]), tensors["logits_rows"], attention, size)


def _tokens(run: Run) -> array[int]:
    """The tokens of a run; none where the only one is in flight."""
    known = run.sequence.token_ids[run.start : run.start + run.num_tokens]
    return known + array("q", run.draft.token_ids) if run.draft.token_ids else known


def _logits_rows(runs: Seq[Run], query_starts: np.ndarray) -> np.ndarray:
    """The last row of each run that reaches its sequence's end; of one with a draft, those before and at its stops."""
    wanted = np.array([run.wants_logits for run in runs], dtype=bool)
    last_rows: np.ndarray = query_starts[1:][wanted] - 1
    drafts = [run.draft for run in runs if run.wants_logits]
    if not any(draft.token_ids for draft in drafts):
        return last_rows
    offsets = [np.array((0, *draft.stops)) - len(draft.token_ids) for draft in drafts]
    rows: np.ndarray = np.repeat(last_rows, [len(each) for each in offsets]) + np.concatenate(offsets)
    return rows


def _block_table(sequences: Seq[Sequence]) -> np.ndarray:
    """Block numbers [S, M], padded with 0."""
    lens = np.array([len(sequence.block_ids) for sequence in sequences])
    table = np.zeros((len(sequences), lens.max()), dtype=np.int64)
    table[np.arange(lens.max()) < lens[:, None]] = _concatenate(sequence.block_ids for sequence in sequences)
    return table


def _concatenate(arrays: Iterable[array[int]]) -> np.ndarray:
    """One after the other, int64; copied as bytes, which takes a tenth of the time that numpy takes."""
    return np.frombuffer(bytearray().join(arrays), dtype=np.int64)
