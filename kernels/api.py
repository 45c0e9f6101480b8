"""The tensor operations the engine needs; each docstring is the specification that every backend is tested against.

Shape legend: N rows of a step (tokens), S sequences, L logit rows, H query heads, G key-value heads, D head size,
B block size, M blocks per sequence (padded), V vocabulary, W = ceil(V / 32) mask words; R latent size, P rotary size;
E experts, K experts of a row, X rows sorted by expert, I inner size. Knows nothing of requests.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np
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
    query_lens: tuple[int, ...]  # on the host; empty in a recorded step of any runs, those without rows included
    host_seq_lens: tuple[int, ...]  # empty in a recorded step
    num_decodes: int  # sequences 0 .. num_decodes - 1 have one row each; the rest may have more
    host_table: np.ndarray | None = None  # block_table on the host, where it is known there
    shared: Tensor | None = None  # int64 [2]: keys, whole blocks, that all sequences of one row share; one of these


class HeadNorms(NamedTuple):
    """Norms over each head of queries and keys, before they are rotated: weights [D]."""

    q: Tensor
    k: Tensor
    eps: float


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


class Scoring(StrEnum):
    """How a router's logits become scores, in fp32."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"  # DeepSeek V4


@dataclass(frozen=True)
class Gate:
    """How a router picks experts: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (2412.19437), Qwen3 (2505.09388)."""

    scoring: Scoring
    num_selected: int  # K
    num_groups: int = 1  # experts come in so many equal runs ...
    num_groups_selected: int = 1  # ... of which only so many may be picked from
    num_best_in_group: int = 1  # a group's score is the sum of so many of its highest scores
    is_normalized: bool = False  # weights of a row sum up to ``scale``
    scale: float = 1.0


@dataclass(frozen=True)
class ExpertRows:
    """The N * K pairs (row, chosen expert) sorted by expert, then by row: what a grouped GEMM computes.

    Pairs with expert -1 follow behind the last run and are not computed. Each expert's run is padded to a multiple of
    the backend's row alignment. X depends on N, K, E and the alignment alone, so that a CUDA graph can hold it.
    """

    sources: Tensor  # int64 [X]: the row that is copied here; any in padding
    experts: Tensor  # int32 [X]: its expert; -1 for padding (DeepGEMM's grouped_layout)
    ends: Tensor  # int32 [E]: where each expert's run ends, its padding included
    places: Tensor  # int64 [N, K]: where each pair went


@dataclass(frozen=True)
class Dispatched:
    """Rows [X, hidden] that chose an expert of this rank, from all ranks, and what it takes to send results back.

    ``experts`` counts from this rank's first expert; -1 marks a choice that is on another rank.
    """

    x: Tensor  # [X, hidden]
    weights: Tensor  # float32 [X, K]
    experts: Tensor  # int64 [X, K]
    handle: Any  # of the exchange that made it


class Exchange(Protocol):
    """Moves rows between ranks that each hold an equal run of a layer's experts. All ranks call it equally often."""

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor, *, max_rows: int) -> Dispatched:
        """Send each row of ``x`` [N, hidden], with weights and experts [N, K], to the ranks that hold its experts.

        Rank r of R holds experts r * E / R and those after it. No rank has more than ``max_rows`` rows, which all
        ranks pass alike: a form of static shape sends so many, whatever N is.
        """

    def combine(self, y: Tensor, sent: Dispatched) -> Tensor:
        """Sum up over ranks what became of each row: ``y`` [X, hidden] in the order of ``sent.x`` -> [N, hidden].

        Summed in fp32 in the order of ranks, so that a row's result depends on no other row.
        """


BLOCK_SIZE = 16
"""Tokens of a cache block where nothing asks for more: the shorter, the more of a prompt's shared start is found."""


@dataclass(frozen=True)
class Choice:
    """Which backend runs an operation, and why; logged, stored with the job and shown by the doctor."""

    operation: str
    backend: str
    reason: str


class Kernels(Protocol):
    """A full set of operations for one device and dtype."""

    name: str

    @property
    def unrecordable(self) -> frozenset[str]:
        """Operations that read tensors on the host, so that no CUDA graph can hold a decode step with them."""

    @property
    def prefix_sharing(self) -> frozenset[str]:
        """Operations that read what ``AttentionBatch.shared`` names once for all decode rows."""

    @property
    def decode_only(self) -> frozenset[str]:
        """Operations that a CUDA graph can hold only where each sequence has one row."""

    def latent_block_size(self, num_heads: int) -> int:
        """Tokens of a cache block with which ``latent_attention`` of so many heads is fastest."""

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """Prepare ``weight`` [out, in] (and ``bias`` [out]) for ``linear``; may copy it into a faster layout."""

    def pack_projection(self, weight: Tensor, bias: Tensor | None = None) -> Any:
        """As ``pack_weight``, for the projections inside layers: in fp8 with block scales if the job asks for it.

        Codes and scales are those of kernels.reference_fp8; ``linear`` then rounds ``x`` to fp8 too.
        """

    def linear(self, x: Tensor, packed: Any) -> Tensor:
        """``x`` [N, in] times the packed weight, transposed, plus its bias: [N, out] in x's dtype."""

    def wide_linear(self, x: Tensor, packed: Any) -> Tensor:
        """``linear`` in float32: the backend may leave the sums unrounded."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x`` / sqrt(mean(x^2) + eps) * ``weight`` over the last dimension, computed in fp32, in x's dtype."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual); either input may be overwritten."""

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate halves (not interleaved pairs) of q [N, H, D] and k [N, G, D] by cos, sin [N, D] (RoFormer).

        With ``norms``, each head goes through ``rms_norm`` first.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``gate_up`` [N, 2I] -> silu(first half) * second half: [N, I]."""

    def write_kv(self, cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, G, D] into one layer's cache [2, num_blocks, B, G, D] at ``slots``, in place."""

    def rotary_write_kv(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor], *, cache: Tensor, slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """``rotary``, and ``write_kv`` of the rotated keys with v: the rotated q."""

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of q [N, H, D] over the cache (rows already written): [N, H, D].

        Head h reads key-value head h // (H // G). With ``window`` w a row at position p sees p - w + 1 .. p.
        """

    def write_latent(self, cache: Tensor, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """Store latent [N, R] and rotated k_rope [N, P] side by side at ``slots``, in place.

        One layer's cache is [num_blocks, B, 1, R + P], contiguous, and for FlashMLA [num_blocks, 64, 1, 512 + 64].
        """

    def pack_up_projection(self, weight: Tensor, num_heads: int, key_size: int) -> Any:
        """Prepare ``weight`` [H * (D + Dv), R], each head's D = key_size key rows before its Dv value rows."""

    def latent_attention(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: Any, *, scale: float
    ) -> Tensor:
        """Causal multi-head latent attention (arXiv:2405.04434) over the cache, rows already written: [N, H, Dv].

        q [N, H, D] and the rotated q_rope [N, H, P] are one query; its key is (latent projected up by the head's key
        rows, k_rope), its value the latent projected up by the head's value rows. The backend decides which rows
        project cached latents up and which absorb the projection into query and output.
        """

    def pack_router(self, weight: Tensor) -> Any:
        """Prepare a router's weight, float32 [E, hidden], for ``router_logits``."""

    def router_logits(self, x: Tensor, packed: Any) -> Tensor:
        """``x`` [N, hidden] times the router's weight, transposed, in fp32 whatever x's dtype: [N, E].

        Or [T, N, E]: parts that ``route`` adds up.
        """

    def route(self, logits: Tensor, gate: Gate, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Pick K experts a row from ``router_logits``: (weights float32 [N, K], experts int64 [N, K]).

        ``bias`` float32 [E] is added to the scores for picking only. Groups first, then experts of the picked groups,
        highest score first, lowest index on ties. Weights are scores without bias, normalised if asked, times scale.
        """

    row_alignment: int
    """Rows of one expert in ``grouped_linear`` come in multiples of this; 128 for DeepGEMM on Hopper."""

    def pack_experts(self, gate_up: Tensor, down: Tensor, limit: float | None = None) -> Any:
        """Prepare the weights [E, 2I, hidden] and [E, hidden, I] of E gated MLPs; in fp8 as ``pack_projection``.

        With ``limit``, what silu takes is at most that, and what it is multiplied by is within it (DeepSeek V4).
        """

    def grouped_linear(self, x: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        """``x`` [X, in] times its row's expert of ``weight`` [E, out, in], transposed: [X, out]; undefined in padding.

        Operands are contiguous: DeepGEMM's m_grouped_bf16_gemm_nt_contiguous, torch's grouped_mm by ``rows.ends``.
        """

    def experts_mlp(self, x: Tensor, weights: Tensor, experts: Tensor, packed: Any) -> Tensor:
        """Sum of K gated MLPs a row of ``x`` [N, hidden], times their weights, in fp32 and in slot order: [N, hidden].

        ``weights`` float32 and ``experts`` int64 [N, K] come from ``route`` or ``Exchange.dispatch``; expert -1 adds
        nothing. A row's result does not depend on others.
        """

    def sinkhorn(self, logits: Tensor, num_iterations: int, eps: float) -> Tensor:
        """Matrices [N, S, S] of ``logits``, float32: softmax of rows plus ``eps``, then columns and rows divided in
        turn by their sums plus ``eps``, columns ``num_iterations`` times, first and last (Sinkhorn, Knopp 1967).
        """

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """Set logits [L, V] to -inf, in place, where bit v % 32 of word v // 32 of ``bitmask[rows[l]]`` is 0.

        ``bitmask`` int32 [R, W], ``rows`` int32 [L]. Many rows of logits may name one row of ``bitmask``.
        """

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """Draw one token per row of float32 logits [L, V]: (tokens int64 [L], logprobs float32 [L]).

        Greedy rows take the largest logit, lowest index on ties. Others: temperature, then top-k, top-p, min-p, then
        the inverse CDF at u = uniform(seed, position). The log-probability is that of the masked logits at
        temperature 1. A row that allows no token returns -1.
        """
