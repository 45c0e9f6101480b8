"""Build StepBatch and AttentionBatch by hand, with shuffled blocks: the tests' stand-in for the scheduler."""

import dataclasses
import random
from collections.abc import Sequence
from typing import TypeVar

import torch

from engine.batch import StepBatch, StepSize
from kernels.api import AttentionBatch

BLOCK_SIZE = 4

Batch = TypeVar("Batch", AttentionBatch, StepBatch)


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The same step on another device."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
    inner = {name: move_batch(value, device) for name, value in values.items() if isinstance(value, AttentionBatch)}
    return dataclasses.replace(batch, **moved, **inner)


def block_tables(num_tokens: Sequence[int], *, seed: int = 0, block_size: int = BLOCK_SIZE) -> list[list[int]]:
    """Give each sequence enough blocks for its tokens, in random order; block 0 is never used."""
    sizes = [-(-tokens // block_size) for tokens in num_tokens]
    blocks = list(range(1, sum(sizes) + 1))
    random.Random(seed).shuffle(blocks)
    return [[blocks.pop() for _ in range(size)] for size in sizes]


def attention_batch(
    starts: Sequence[int], query_lens: Sequence[int], tables: Sequence[Sequence[int]], block_size: int = BLOCK_SIZE
) -> AttentionBatch:
    """Sequence s computes positions starts[s] .. starts[s] + query_lens[s] - 1 in the blocks of tables[s]."""
    width = max(len(table) for table in tables)
    block_table = torch.tensor([[*table, *[0] * (width - len(table))] for table in tables])
    positions = [torch.arange(start, start + rows) for start, rows in zip(starts, query_lens, strict=True)]
    slots = [
        torch.tensor(table)[at // block_size] * block_size + at % block_size
        for table, at in zip(tables, positions, strict=True)
    ]
    seq_lens = tuple(start + rows for start, rows in zip(starts, query_lens, strict=True))
    first_long = next((i for i, rows in enumerate(query_lens) if rows != 1), len(query_lens))
    return AttentionBatch(
        slots=torch.cat(slots),
        block_table=block_table,
        seq_lens=torch.tensor(seq_lens),
        query_starts=torch.tensor([0, *query_lens]).cumsum(0),
        positions=torch.cat(positions),
        query_lens=tuple(query_lens),
        host_seq_lens=seq_lens,
        num_decodes=first_long,
    )


def step_batch(
    token_ids: Sequence[Sequence[int]],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    logits_rows: Sequence[int] | None = None,
    block_size: int = BLOCK_SIZE,
) -> StepBatch:
    """A step that computes token_ids[s] at starts[s]; by default every sequence wants the logits of its last row."""
    attention = attention_batch(starts, [len(ids) for ids in token_ids], tables, block_size)
    rows = attention.query_starts[1:] - 1 if logits_rows is None else torch.tensor(logits_rows, dtype=torch.int64)
    flat = torch.tensor([token for ids in token_ids for token in ids])
    size = StepSize(len(flat), len(rows), len(flat) == len(token_ids))
    return StepBatch(input_ids=flat, positions=attention.positions, logits_rows=rows, attention=attention, size=size)
