"""CUDA graphs of steps: one per padded number of rows, replayed instead of launching kernel by kernel.

Decode steps have graphs of their own, which need no kernel for runs; any other step of few rows has one that takes any
runs. A graph reads its inputs from one fixed buffer, filled in one transfer; padding rows write to block 0, which
nobody owns. Knows no requests; on other devices there are no graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.batch import StepBatch, StepSize
from engine.models import Model
from kernels.api import AttentionBatch

if TYPE_CHECKING:
    from engine.models import KVCache

log = structlog.get_logger()

ROW_FIELDS = {"input_ids": 0, "sources": -1, "positions": 0, "slots": 0}
"""The inputs of a row, and their values in a padding row."""
RUN_FIELDS = {"seq_lens": 1, "logits_rows": 0}
"""The inputs of a run, as above; ``query_starts``, ``shared`` and the block table come after them."""
NUM_SHARED = 2  # numbers of AttentionBatch.shared

SMALL_SIZES = (1, 2, 4, 8, 16)
SIZE_STEP = 32
MIXED_SIZES = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096)
"""Rows of steps that are not all decodes."""
MIN_FILLED_ROWS = 512
"""Below, a step takes about as long as reading the weights, and padding costs nothing; above, it does."""
NUM_WARM_UPS = 2  # lets libraries choose their algorithms and kernels compile before anything is recorded


@dataclass(frozen=True)
class GraphLimits:
    """What graphs must be able to hold."""

    max_runs: int
    max_rows: int  # of steps that are not all decodes
    max_blocks: int  # of one sequence


@dataclass(frozen=True)
class Shape:
    """What a graph is recorded for: up to so many rows in up to so many runs."""

    rows: int
    runs: int
    is_decode: bool  # each run has one row
    is_shared: bool = False  # decode rows may share a prefix


@dataclass(frozen=True)
class Recorded:
    """A graph with its fixed input and output tensors."""

    graph: torch.cuda.CUDAGraph
    pinned: Tensor  # int64, host: a step's inputs are laid out here ...
    host: Mapping[str, np.ndarray]  # ... through these views ...
    inputs: Tensor  # ... and copied here
    batch: StepBatch  # what the graph reads: views of ``inputs``, and constants that must outlive it
    hidden: Tensor  # [runs, hidden]
    was_copied: torch.cuda.Event


def decode_sizes(max_rows: int) -> tuple[int, ...]:
    """Row counts that get a graph, ascending: powers of two, then multiples of SIZE_STEP, up to ``max_rows``."""
    steps = range(SIZE_STEP, max_rows + SIZE_STEP, SIZE_STEP)
    return tuple(sorted({min(size, max_rows) for size in (*SMALL_SIZES, *steps)}))


def graph_shapes(limits: GraphLimits, *, has_shared: bool) -> list[Shape]:
    """What is recorded, by kind, each ascending."""
    sizes = decode_sizes(limits.max_runs)
    decodes = [Shape(size, size, True, is_shared) for is_shared in {False, has_shared} for size in sizes]
    mixed = [
        Shape(size, min(size, limits.max_runs), False, has_shared) for size in MIXED_SIZES if size <= limits.max_rows
    ]
    return decodes + mixed


class StepGraphs:
    """Records all graphs when made, largest first so that the smaller ones fit into its memory."""

    @torch.inference_mode()
    def __init__(self, model: Model, cache: KVCache, device: torch.device, limits: GraphLimits) -> None:
        self._model = model
        self._max_blocks = limits.max_blocks
        self._drawn = torch.zeros(limits.max_runs, dtype=torch.int64, device=device)
        self._has_shared = model.shares_prefixes
        shapes = graph_shapes(limits, has_shared=self._has_shared)
        self._sizes = {kind: sorted({each.rows for each in shapes if each.is_decode is kind}) for kind in (True, False)}
        self.step_sizes = tuple(size for size in self._sizes[False] if size >= MIN_FILLED_ROWS)
        pool = torch.cuda.graph_pool_handle()
        self._recorded = {
            (shape.is_decode, shape.is_shared, shape.rows): self._record(cache, device, shape, pool)
            for shape in sorted(shapes, key=lambda shape: -shape.rows)
        }
        log.info("step_graphs_recorded", num_graphs=len(shapes), max_rows=max(shape.rows for shape in shapes))

    def run(self, arrays: Mapping[str, np.ndarray], size: StepSize, drawn: Tensor | None) -> Tensor | None:
        """Logits [L, V] of the rows ``logits_rows``, or None where no graph holds a step of that size.

        ``arrays`` are those of runner.lay_out, and of find_shared where the model asks; ``drawn`` as in Runner.run.
        """
        sizes = self._sizes[size.is_decode]
        if not sizes or size.rows > sizes[-1]:
            return None
        is_shared = self._has_shared and (not size.is_decode or arrays["shared"][0] > 0)
        recorded = self._recorded[size.is_decode, is_shared, sizes[bisect_left(sizes, size.rows)]]
        recorded.was_copied.synchronize()
        _fill(recorded.host, arrays)
        recorded.inputs.copy_(recorded.pinned, non_blocking=True)
        recorded.was_copied.record()
        if drawn is not None:
            self._drawn[: len(drawn)].copy_(drawn)
        recorded.graph.replay()
        return self._model.logits(recorded.hidden[: len(arrays["logits_rows"])])

    def _record(self, cache: KVCache, device: torch.device, shape: Shape, pool: Any) -> Recorded:
        pinned = torch.zeros(_num_inputs(shape, self._max_blocks), dtype=torch.int64).pin_memory()
        host = {name: part.numpy() for name, part in _split(pinned, shape, self._max_blocks).items()}
        nothing = {name: np.empty(0, np.int64) for name in (*ROW_FIELDS, *RUN_FIELDS)}
        _fill(host, nothing | {"query_starts": np.zeros(1, np.int64), "block_table": np.empty((0, 0), np.int64)})
        inputs = pinned.to(device)
        parts = _split(inputs, shape, self._max_blocks)
        batch = _fixed_batch(parts, shape)

        def forward() -> Tensor:
            input_ids = fill_in(parts["input_ids"], parts["sources"], self._drawn)
            return self._model.forward(replace(batch, input_ids=input_ids), cache)

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARM_UPS):
                forward()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # NCCL has a thread of its own
            hidden = forward()
        return Recorded(graph, pinned, host, inputs, batch, hidden, torch.cuda.Event())  # type: ignore[no-untyped-call]


def fill_in(input_ids: Tensor, sources: Tensor, drawn: Tensor) -> Tensor:
    """``input_ids`` int64 [N], with drawn[source] where a source is not negative; a dead draw (-1) becomes token 0."""
    found = drawn[sources.clamp(0, len(drawn) - 1)].clamp(min=0)
    return torch.where(sources >= 0, found, input_ids)


def _even(count: int) -> int:
    """Round up to whole alignments of 16 bytes: kernels are compiled anew for another alignment."""
    return count + count % 2


def _num_inputs(shape: Shape, max_blocks: int) -> int:
    fields = len(ROW_FIELDS) * _even(shape.rows) + len(RUN_FIELDS) * _even(shape.runs)
    return fields + _even(shape.runs + 1) + NUM_SHARED + shape.runs * max_blocks


def _split(flat: Tensor, shape: Shape, max_blocks: int) -> dict[str, Tensor]:
    """Views of a graph's flat buffer, by name."""
    sizes = dict.fromkeys(ROW_FIELDS, shape.rows) | dict.fromkeys(RUN_FIELDS, shape.runs)
    sizes |= {"query_starts": shape.runs + 1, "shared": NUM_SHARED}
    parts, start = {}, 0
    for name, size in sizes.items():
        parts[name] = flat[start : start + size]
        start += _even(size)
    parts["block_table"] = flat[start:].view(shape.runs, max_blocks)
    return parts


def _fill(host: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a step's inputs, and padding behind them: rows of nobody, runs without rows."""
    for name, padding in (ROW_FIELDS | RUN_FIELDS).items():
        count = len(arrays[name])
        host[name][:count] = arrays[name]
        host[name][count:] = padding
    starts, table = arrays["query_starts"], arrays["block_table"]
    host["query_starts"][: len(starts)] = starts
    host["query_starts"][len(starts) :] = starts[-1]
    host["shared"][:] = arrays.get("shared", 0)
    host["block_table"][: len(table), : table.shape[1]] = table


def _fixed_batch(parts: Mapping[str, Tensor], shape: Shape) -> StepBatch:
    attention = AttentionBatch(
        slots=parts["slots"],
        block_table=parts["block_table"],
        seq_lens=parts["seq_lens"],
        query_starts=parts["query_starts"],
        positions=parts["positions"],
        query_lens=(1,) * shape.runs if shape.is_decode else (),
        host_seq_lens=(),  # lengths change from replay to replay: kernels in a graph read seq_lens
        num_decodes=shape.runs if shape.is_decode else 0,
        shared=parts["shared"] if shape.is_shared else None,
    )
    size = StepSize(shape.rows, shape.runs, shape.is_decode)
    return StepBatch(parts["input_ids"], parts["positions"], parts["logits_rows"], attention, size)
