"""Mirrored parts of a step: together they are the step, each row sees its own keys, and the work is even."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.mirror import mirror

BLOCK_SIZE = 4


def layout(lens: list[int], starts: list[int]) -> dict[str, np.ndarray]:
    """Runs of so many rows after so many computed ones, all wanting logits; token ids and slots are unique."""
    query_starts = np.concatenate(([0], np.cumsum(lens)))
    num_rows = int(query_starts[-1])
    width = max(-(-(start + length) // BLOCK_SIZE) for start, length in zip(starts, lens, strict=True))
    return {
        "input_ids": np.arange(num_rows) + 1000,
        "sources": np.where(np.arange(num_rows) % 3, -1, np.arange(num_rows)),
        "positions": np.concatenate([start + np.arange(length) for start, length in zip(starts, lens, strict=True)]),
        "slots": np.arange(num_rows) + BLOCK_SIZE,
        "logits_rows": query_starts[1:] - 1,
        "block_table": np.arange(len(lens) * width).reshape(len(lens), width) + 1,
        "seq_lens": np.array(starts) + lens,
        "query_starts": query_starts,
    }


def rows_of(part: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What a kernel makes of a part: each row's token, position, last key and block table."""
    runs = enumerate(zip(part["query_starts"][:-1], part["query_starts"][1:], strict=True))
    return [
        {
            "token": int(part["input_ids"][row]),
            "source": int(part["sources"][row]),
            "position": int(part["positions"][row]),
            "last_key": int(part["seq_lens"][run]) - int(end) + row,
            "table": part["block_table"][run].tolist(),
        }
        for run, (first, end) in runs
        for row in range(first, end)
    ]


runs = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=6)


@given(runs, st.integers(2, 4))
def test_all_parts_together_are_the_step(drawn: list[tuple[int, int]], count: int) -> None:
    whole = layout([length for length, _ in drawn], [start for _, start in drawn])
    parts = [mirror(whole, index, count) for index in range(count)]
    num_rows = len(parts[0]["input_ids"])
    assert all(len(part["input_ids"]) == num_rows for part in parts)
    seen = [row for part in parts for row in rows_of(part)]
    real = [row for row in seen if row["token"]]
    assert sorted(real, key=lambda row: row["token"]) == rows_of(whole)
    assert all(row["position"] == row["last_key"] for row in seen)
    assert all(set(row["table"]) == {0} and row["source"] == -1 for row in seen if not row["token"])
    slots = parts[0]["slots"]
    assert all(np.array_equal(part["slots"], slots) for part in parts)
    slot_of = dict(zip(whole["input_ids"].tolist(), whole["slots"].tolist(), strict=True)) | {0: 0}
    assert slots.tolist() == [slot_of[row["token"]] for row in seen]
    assert parts[0]["input_ids"][parts[0]["logits_rows"]].tolist() == whole["input_ids"][whole["logits_rows"]].tolist()
    assert all(part["logits_rows"].tolist() == [0] for part in parts[1:])


def test_a_long_prefill_costs_all_ranks_the_same() -> None:
    whole = layout([1200], [0])
    costs = [sum(row["last_key"] + 1 for row in rows_of(mirror(whole, index, 3))) for index in range(3)]
    assert max(costs) - min(costs) < 0.001 * sum(costs)
