"""Context parallelism: which rows of a step each of C ranks computes, so that causal attention costs all the same.

A run is cut into 2C chunks; rank r takes chunk r and chunk 2C - 1 - r, whose keys end at the chunk's own end. Every
rank writes the keys of all rows, which it gathers layer by layer. Pure arithmetic on layouts.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

Arrays = Mapping[str, np.ndarray]


def mirror(arrays: Arrays, index: int, count: int) -> dict[str, np.ndarray]:
    """Cut a layout of runner.lay_out down to the rows of rank ``index`` of ``count``.

    Rows of nobody, in front, fill all ranks up to one number; ``slots`` are those of all ranks' rows, rank by rank. The
    last chunk of a run is never empty, so that rank 0 has all rows whose logits are wanted; the others want those of
    one row, which nobody reads.
    """
    chunks = [_chunks(arrays["query_starts"], part, count) for part in range(count)]
    rows = [_rows(part.starts, part.ends) for part in chunks]
    num_rows = max(len(part) for part in rows)
    mine, chunk, padding = rows[index], chunks[index], num_rows - len(rows[index])
    before = arrays["seq_lens"] - arrays["query_starts"][1:]  # from a run's end as a row to its end as a position
    table = arrays["block_table"]
    lens = np.concatenate((np.ones(padding, np.int64), chunk.ends - chunk.starts))
    return {
        "input_ids": _fill(arrays["input_ids"][mine], num_rows, 0),
        "sources": _fill(arrays["sources"][mine], num_rows, -1),
        "positions": _fill(arrays["positions"][mine], num_rows, 0),
        "slots": np.concatenate([_fill(arrays["slots"][part], num_rows, 0) for part in rows]),
        "logits_rows": padding + np.searchsorted(mine, arrays["logits_rows"]) if index == 0 else np.zeros(1, np.int64),
        "block_table": np.concatenate((np.zeros((padding, table.shape[1]), np.int64), table[chunk.runs])),
        "seq_lens": np.concatenate((np.ones(padding, np.int64), before[chunk.runs] + chunk.ends)),
        "query_starts": np.concatenate(([0], np.cumsum(lens))),
    }


class Chunks(NamedTuple):
    """Parts of runs, in order of rows: each its run, first row and end."""

    runs: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def _chunks(query_starts: np.ndarray, index: int, count: int) -> Chunks:
    """The chunks of rank ``index`` that are not empty."""
    firsts, lens = query_starts[:-1], np.diff(query_starts)
    runs = np.repeat(np.arange(len(lens)), 2)
    numbers = np.tile([index, 2 * count - 1 - index], len(lens))
    starts = firsts[runs] + lens[runs] * numbers // (2 * count)
    ends = firsts[runs] + lens[runs] * (numbers + 1) // (2 * count)
    is_full = ends > starts
    return Chunks(runs[is_full], starts[is_full], ends[is_full])


def _rows(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    lens = ends - starts
    rows: np.ndarray = np.repeat(starts, lens) + np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
    return rows


def _fill(values: np.ndarray, count: int, padding: int) -> np.ndarray:
    return np.pad(values, (count - len(values), 0), constant_values=padding)
