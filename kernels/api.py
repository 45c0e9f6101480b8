"""The tensor operations the engine needs; each docstring is the specification that every backend is tested against.

Shape legend: N rows of a step (tokens), S sequences, L logit rows, H query heads, G key-value heads, D head size,
B block size, M blocks per sequence (padded), V vocabulary, W = ceil(V / 32) mask words. Knows nothing of requests.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Where the rows of a step read and write the paged KV cache. Sequences are contiguous runs of rows.

    A sequence's rows are its last ``query_lens[s]`` positions; ``seq_lens`` counts them in, so row i of sequence s
    attends to positions 0 .. seq_lens[s] - query_lens[s] + i.
    """

    slots: Tensor  # int64 [N]: block * B + offset, where the row's key and value are written
    block_table: Tensor  # int64 [S, M], padded with 0 (block 0 is never allocated)
    seq_lens: Tensor  # int64 [S]
    query_starts: Tensor  # int64 [S + 1], cumulative query_lens
    positions: Tensor  # int64 [N]
    query_lens: tuple[int, ...]  # on the host
    host_seq_lens: tuple[int, ...]
    num_decodes: int  # sequences 0 .. num_decodes - 1 have one row each; the rest may have more


@dataclass(frozen=True)
class SamplingBatch:
    """Per-logit-row sampling parameters. ``None`` means that no row of the batch uses the filter."""

    temperature: Tensor  # float32 [L]; 0: greedy
    seeds: Tensor  # int64 [L]
    positions: Tensor  # int64 [L]: index of the output token being drawn
    top_k: Tensor | None = None  # int64 [L]; 0: off
    top_p: Tensor | None = None  # float32 [L]; 1: off
    min_p: Tensor | None = None  # float32 [L]; 0: off
    is_all_greedy: bool = False


@dataclass(frozen=True)
class Choice:
    """Which backend runs an operation, and why; logged, stored with the job and shown by the doctor."""

    operation: str
    backend: str
    reason: str


class Kernels(Protocol):
    """A full set of operations for one device and dtype."""

    name: str

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Prepare ``weight`` [out, in] (and ``bias`` [out]) for ``linear``; may copy it into a faster layout."""

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """``x`` [N, in] times the packed weight, transposed, plus its bias: [N, out] in x's dtype."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x`` / sqrt(mean(x^2) + eps) * ``weight`` over the last dimension, computed in fp32, in x's dtype."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual); either input may be overwritten."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves (not interleaved pairs) of q [N, H, D] and k [N, G, D] by cos, sin [N, D] (RoFormer)."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``gate_up`` [N, 2I] -> silu(first half) * second half: [N, I]."""

    def write_kv(self, cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, G, D] into one layer's cache [2, num_blocks, B, G, D] at ``slots``, in place."""

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of q [N, H, D] over the cache (rows already written): [N, H, D].

        Head h reads key-value head h // (H // G). With ``window`` w a row at position p sees p - w + 1 .. p.
        """

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor) -> None:
        """Set logits [L, V] to -inf, in place, where bit v % 32 of word v // 32 of ``bitmask`` int32 [L, W] is 0."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Draw one token per row of float32 logits [L, V]: (tokens int64 [L], logprobs float32 [L]).

        Greedy rows take the largest logit, lowest index on ties. Others: temperature, then top-k, top-p, min-p, then
        the inverse CDF at u = uniform(seed, position). The log-probability is that of the masked logits at
        temperature 1. A row that allows no token returns -1.
        """
