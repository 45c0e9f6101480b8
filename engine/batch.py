"""What one step computes: a flat list of rows, any mix of prefill chunks and decode rows. Knows no requests."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from kernels.api import AttentionBatch


@dataclass(frozen=True)
class StepSize:
    """The largest of each over the ranks that step together; what they exchange has this size on all of them."""

    rows: int
    logits_rows: int
    is_decode: bool  # no rank has a run of several rows


@dataclass(frozen=True)
class StepBatch:
    """Device tensors of one step, built once by the scheduler's side and read by the model."""

    input_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    logits_rows: Tensor  # int64 [L]: the rows whose next token is wanted, in sequence order
    attention: AttentionBatch
    size: StepSize


class Rows(NamedTuple):
    """What a feed-forward part may know of the rows it is given, beside their values."""

    positions: Tensor  # int64 [N]
    max_rows: int  # the most that any rank has
    counted: Tensor | None = None  # int32 [N]: 1, or 0 for a row of nobody; None where picks of experts are not counted
