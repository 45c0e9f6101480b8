"""CUDA graphs of decode steps: one per padded number of rows, replayed instead of launching kernel by kernel.

A graph reads its inputs from one fixed buffer, which a step fills in one transfer. Padding rows attend to one key of
block 0, which nobody owns. Knows no requests; on other devices there are no graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.models import Model
from kernels.api import AttentionBatch

if TYPE_CHECKING:
    from engine.models import KVCache

log = structlog.get_logger()

FIELDS = {"input_ids": 0, "sources": -1, "positions": 0, "slots": 0, "seq_lens": 1}
"""The inputs of a row, and their values in a padding row."""

SMALL_SIZES = (1, 2, 4, 8, 16)
SIZE_STEP = 32
NUM_WARM_UPS = 2  # lets libraries choose their algorithms and kernels compile before anything is recorded


@dataclass(frozen=True)
class GraphLimits:
    """What graphs must be able to hold."""

    max_rows: int
    max_blocks: int  # of one sequence


@dataclass(frozen=True)
class Recorded:
    """A graph with its fixed input and output tensors."""

    graph: torch.cuda.CUDAGraph
    pinned: Tensor  # int64, host: a step's inputs are laid out here ...
    fields: Mapping[str, np.ndarray]  # ... through these views ...
    table: np.ndarray
    inputs: Tensor  # ... and copied here
    batch: StepBatch  # what the graph reads: views of ``inputs``, and constants that must outlive it
    logits: Tensor  # float32 [rows, V]
    was_copied: torch.cuda.Event


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Row counts that get a graph, ascending: powers of two, then multiples of SIZE_STEP, up to ``max_rows``."""
    steps = range(SIZE_STEP, max_rows + SIZE_STEP, SIZE_STEP)
    return tuple(sorted({min(size, max_rows) for size in (*SMALL_SIZES, *steps)}))


class DecodeGraphs:
    """Records all graphs when made, largest first so that the smaller ones fit into its memory."""

    @torch.inference_mode()
    def __init__(self, model: Model, cache: KVCache, device: torch.device, limits: GraphLimits) -> None:
        self._max_blocks = limits.max_blocks
        self._sizes = graph_sizes(limits.max_rows)
        self._recorded: dict[int, Recorded] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._recorded[size] = self._record(model, cache, device, size, pool)
        log.info("decode_graphs_recorded", num_graphs=len(self._sizes), max_rows=limits.max_rows)

    def run(self, arrays: Mapping[str, np.ndarray], drawn: Tensor | None) -> Tensor:
        """Logits [rows, V] of one decode row per sequence; valid until the next call.

        ``arrays``: the inputs of FIELDS, int64 [rows], and block_table, int64 [rows, M]. ``drawn`` as in Runner.run.
        """
        rows = len(arrays["input_ids"])
        recorded = self._recorded[self._sizes[bisect_left(self._sizes, rows)]]
        recorded.was_copied.synchronize()
        table = arrays["block_table"]
        recorded.table[:rows, : table.shape[1]] = table
        for name, field in recorded.fields.items():
            field[:rows] = arrays[name]
            field[rows:] = FIELDS[name]
        recorded.inputs.copy_(recorded.pinned, non_blocking=True)
        recorded.was_copied.record()
        if drawn is not None:
            fields, _ = _split(recorded.inputs, recorded.batch.input_ids.shape[0])
            fields["input_ids"].copy_(fill_in(fields["input_ids"], fields["sources"], drawn))
        recorded.graph.replay()
        return recorded.logits[:rows]

    def _record(self, model: Model, cache: KVCache, device: torch.device, size: int, pool: Any) -> Recorded:
        pinned = torch.zeros(size * (len(FIELDS) + self._max_blocks), dtype=torch.int64).pin_memory()
        fields, table = _split(pinned, size)
        fields["seq_lens"].fill_(1)
        inputs = pinned.to(device)
        batch = _fixed_batch(inputs, size)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                model.logits(model.forward(batch, cache))
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = model.logits(model.forward(batch, cache))
        host = {name: field.numpy() for name, field in fields.items()}
        return Recorded(graph, pinned, host, table.numpy(), inputs, batch, logits, torch.cuda.Event())  # type: ignore[no-untyped-call]


def fill_in(input_ids: Tensor, sources: Tensor, drawn: Tensor) -> Tensor:
    """``input_ids`` int64 [N], with drawn[source] where a source is not negative; a dead draw (-1) becomes token 0."""
    found = drawn[sources.clamp(0, len(drawn) - 1)].clamp(min=0)
    return torch.where(sources >= 0, found, input_ids)


def _split(flat: Tensor, size: int) -> tuple[dict[str, Tensor], Tensor]:
    """Views of a graph's flat buffer: the fields [size] and the block table [size, max_blocks]."""
    columns = flat.view(-1, size)
    fields = {name: columns[index] for index, name in enumerate(FIELDS)}
    return fields, columns[len(FIELDS) :].reshape(size, -1)


def _fixed_batch(inputs: Tensor, size: int) -> StepBatch:
    fields, table = _split(inputs, size)
    rows = torch.arange(size + 1, device=inputs.device)
    attention = AttentionBatch(
        slots=fields["slots"],
        block_table=table,
        seq_lens=fields["seq_lens"],
        query_starts=rows,
        positions=fields["positions"],
        query_lens=(1,) * size,
        host_seq_lens=(),  # lengths change from replay to replay: kernels in a graph read seq_lens
        num_decodes=size,
    )
    return StepBatch(fields["input_ids"], fields["positions"], rows[:-1], attention)
