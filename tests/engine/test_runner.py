"""What decode rows of a step share: found from the block table alone, and only where it pays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.runner import MIN_SHARED_KEYS, MIN_SHARERS, find_shared

BLOCK = 16
NUM_COMMON = MIN_SHARED_KEYS // BLOCK


def layout(lens: list[int], tables: list[list[int]], seq_lens: list[int]) -> dict[str, np.ndarray]:
    width = max(map(len, tables))
    return {
        "query_starts": np.cumsum([0, *lens]),
        "block_table": np.array([table + [0] * (width - len(table)) for table in tables]),
        "seq_lens": np.array(seq_lens),
    }


@given(data=st.data())
def test_shared_keys_are_whole_equal_blocks_below_every_length(data: st.DataObject) -> None:
    lens = [data.draw(st.sampled_from([1, 1, 1, 4])) for _ in range(MIN_SHARERS + 4)]
    common = list(range(100, 100 + data.draw(st.integers(0, 2 * NUM_COMMON))))
    tables = [[*common, 1000 + run, 2000 + run] for run in range(len(lens))]
    seq_lens = [len(common) * BLOCK + data.draw(st.integers(1, 2 * BLOCK)) for _ in lens]
    num_keys, sequence = find_shared(layout(lens, tables, seq_lens), BLOCK).tolist()
    singles = [run for run, length in enumerate(lens) if length == 1]
    pays = len(singles) >= MIN_SHARERS and len(common) >= NUM_COMMON
    assert num_keys == (len(common) * BLOCK if pays else 0)
    assert not pays or sequence in singles


def test_a_row_always_keeps_a_key_of_its_own() -> None:
    tables = [list(range(1, 2 * NUM_COMMON + 1))] * MIN_SHARERS  # as if even the last block were shared
    seq_lens = [2 * NUM_COMMON * BLOCK] * MIN_SHARERS
    num_keys, _ = find_shared(layout([1] * MIN_SHARERS, tables, seq_lens), BLOCK).tolist()
    assert num_keys == (2 * NUM_COMMON - 1) * BLOCK


def test_one_row_that_differs_ends_what_is_shared() -> None:
    tables = [[*list(range(1, 2 * NUM_COMMON + 1)), 500 + row] for row in range(MIN_SHARERS)]
    tables[3][NUM_COMMON + 1] = 999
    seq_lens = [2 * NUM_COMMON * BLOCK + 5] * MIN_SHARERS
    assert find_shared(layout([1] * MIN_SHARERS, tables, seq_lens), BLOCK)[0] == (NUM_COMMON + 1) * BLOCK
