"""What one step computes: a flat list of rows, any mix of prefill chunks and decode rows. Knows no requests."""

from dataclasses import dataclass

from torch import Tensor

from kernels.api import AttentionBatch


@dataclass(frozen=True)
class StepBatch:
    """Device tensors of one step, built once by the scheduler's side and read by the model."""

    input_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    logits_rows: Tensor  # int64 [L]: the rows whose next token is wanted, in sequence order
    attention: AttentionBatch
