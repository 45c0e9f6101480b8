"""Mixing the residual streams of hyper-connections, in plain torch. Shape legend: N rows, S streams."""

from torch import Tensor


def sinkhorn(logits: Tensor, num_iterations: int, eps: float) -> Tensor:
    """See Kernels.sinkhorn."""
    matrix = logits.float().softmax(dim=-1) + eps
    matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        matrix = matrix / (matrix.sum(dim=-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=-2, keepdim=True) + eps)
    return matrix
