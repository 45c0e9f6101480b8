"""Attention of DeepSeek V4: a window of the last tokens, and beyond it entries that stand for several tokens each.

All heads share one vector a token, key and value at once. State lies at the slot of its position, so that a prefix is
shared, and a rejected token overwritten, like any other; a window's entry lies at the slot of its last token.
Shape legend: N rows of a step, n rows of one sequence, T its tokens, H heads, D head size, E entries, m tokens of one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.models import WeightSource
from engine.models.spec import ModelSpec
from kernels.api import AttentionBatch, Kernels

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [N, P / 2] of rows' positions."""


class Run(NamedTuple):
    """The rows of one sequence in a step."""

    rows: slice  # of the step
    start: int  # position of the first
    end: int
    slots: Tensor  # int64 [T]: of positions 0 .. end - 1


class Compressor:
    """Makes one entry of every ``rate`` tokens: their vectors weighted by softmax, normed, rotated to the first.

    With ``overlaps``, vectors have two halves: the second goes into the own window's entry, the first into the next.
    """

    def __init__(
        self, spec: ModelSpec, prefix: str, source: WeightSource, kernels: Kernels, rate: int, *, overlaps: bool
    ) -> None:
        self._kernels, self._eps, self.rate, self._overlaps = kernels, spec.rms_norm_eps, rate, overlaps
        to_vector, to_gate = (source.get(f"{prefix}{name}.weight") for name in ("wkv", "wgate"))
        self._down = kernels.pack_projection(torch.cat((to_vector, to_gate)))
        self._bias = source.get(f"{prefix}ape", torch.float32)
        self._norm = source.get(f"{prefix}norm.weight")
        self._size = len(self._norm)
        self._raw_size = 2 * len(to_vector)
        self.width = self._raw_size + self._size
        """Values cached a token: vector, gate and entry."""

    def write(self, hidden: Tensor, cache: Tensor, batch: AttentionBatch) -> None:
        """Store what entries are made of: rows [N, hidden] into ``cache`` [slots, width]."""
        cache[batch.slots, : self._raw_size] = self._kernels.linear(hidden, self._down)

    def entries(self, cache: Tensor, run: Run, frequencies: Tensor) -> Tensor:
        """Make the entries that the run closes, and return all of the sequence's: [E, D]."""
        first, count, rate = run.start // self.rate, run.end // self.rate, self.rate
        if count > first:
            begin = max(0, first - 1) if self._overlaps else first
            raw = cache[run.slots[begin * rate : count * rate], : self._raw_size].unflatten(0, (-1, rate))
            made = self._make(raw, has_previous=begin < first)
            at = torch.arange(first, count, device=cache.device) * rate
            cache[run.slots[at + rate - 1], self._raw_size :] = rotate_pairs(made, angles_at(at, frequencies))
        return cache[run.slots[rate - 1 : count * rate : rate], self._raw_size :]

    def _make(self, raw: Tensor, *, has_previous: bool) -> Tensor:
        """Windows [E, m, raw] -> entries [E, D], not rotated; the first window is only the next one's past if so."""
        vectors, gates = raw.chunk(2, dim=-1)
        gates = gates.float() + self._bias
        if self._overlaps:
            vectors, gates = (_with_past(x, past) for x, past in ((vectors, 0.0), (gates, -torch.inf)))
        if has_previous:
            vectors, gates = vectors[1:], gates[1:]
        mixed = (vectors * gates.softmax(dim=1).to(vectors.dtype)).sum(dim=1)
        return self._kernels.rms_norm(mixed, self._norm, self._eps)


class Indexer:
    """Scores entries for each row, so that only the best are attended to."""

    def __init__(self, spec: ModelSpec, prefix: str, source: WeightSource, kernels: Kernels, rate: int) -> None:
        compressed = spec.compressed
        assert compressed is not None, "an indexer needs its sizes"
        self._kernels, self._spec = kernels, compressed
        self._query = kernels.pack_projection(source.get(f"{prefix}wq_b.weight"))
        self._weights = kernels.pack_weight(source.get(f"{prefix}weights_proj.weight"))
        self.compressor = Compressor(spec, f"{prefix}compressor.", source, kernels, rate, overlaps=True)

    def ask(self, hidden: Tensor, latent: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Queries [N, heads, size] and the weights [N, heads] of their scores."""
        query = self._kernels.linear(latent, self._query).unflatten(-1, (self._spec.index_heads, -1))
        return rotate_pairs(query, angles), self._kernels.linear(hidden, self._weights)

    def choose(self, query: Tensor, weights: Tensor, entries: Tensor, is_visible: Tensor) -> Tensor:
        """Which of the visible entries each row attends to: bool [n, E]."""
        if len(entries) <= self._spec.index_topk:
            return is_visible
        scores = torch.einsum("nhd,ed->nhe", query.float(), entries.float()).relu() * query.shape[-1] ** -0.5
        scores = (scores * (weights.float() * self._spec.index_heads**-0.5)[..., None]).sum(dim=1)
        best = scores.masked_fill(~is_visible, -torch.inf).topk(self._spec.index_topk, dim=-1).indices
        return is_visible & torch.zeros_like(is_visible).scatter_(1, best, True)


class CompressedAttention:
    """One layer's attention with its weights; ``rate`` 0: only the window."""

    def __init__(self, spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels) -> None:
        compressed = spec.compressed
        assert compressed is not None, "compressed attention needs its sizes"
        prefix, self._rate = f"layers.{index}.attn.", compressed.layer_rates[index]
        self._kernels, self._spec, self._eps = kernels, compressed, spec.rms_norm_eps
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim
        down = [source.get(f"{prefix}{name}.weight") for name in ("wq_a", "wkv")]
        self._down, self._sizes = kernels.pack_projection(torch.cat(down)), [len(part) for part in down]
        self._q_norm, self._kv_norm = (source.get(f"{prefix}{name}.weight") for name in ("q_norm", "norm"))
        self._query = kernels.pack_projection(source.get(f"{prefix}wq_b.weight"))
        self._sinks = source.get(f"{prefix}attn_sink", torch.float32)
        self._grouped = source.get(f"{prefix}wo_a.weight").unflatten(0, (compressed.output_groups, -1))
        self._output = kernels.pack_projection(source.get(f"{prefix}wo_b.weight"))
        self._compressor = self._indexer = None
        if self._rate:
            is_sparse = index in compressed.sparse_layers
            self._compressor = Compressor(spec, f"{prefix}compressor.", source, kernels, self._rate, overlaps=is_sparse)
            self._indexer = Indexer(spec, f"{prefix}indexer.", source, kernels, self._rate) if is_sparse else None

        index_compressor = self._indexer.compressor if self._indexer else None
        widths = [each.width if each else 0 for each in (self._compressor, index_compressor)]
        self._cache_sizes = [self._head_dim, *widths]
        self.cache_width = sum(self._cache_sizes)
        """Values cached a token: the vector, then what the compressor keeps, then what the indexer's does."""

    def __call__(
        self, hidden: Tensor, frequencies: Tensor, batch: AttentionBatch, runs: Sequence[Run], cache: Tensor
    ) -> Tensor:
        """Normed rows [N, hidden] -> [N, hidden]; ``cache`` is [slots, cache_width]."""
        kernels, angles = self._kernels, angles_at(batch.positions, frequencies)
        latent, vector = kernels.linear(hidden, self._down).split(self._sizes, dim=-1)
        latent = kernels.rms_norm(latent, self._q_norm, self._eps)
        query = kernels.linear(latent, self._query).unflatten(-1, (self._num_heads, self._head_dim))
        query = rotate_pairs(functional.rms_norm(query, query.shape[2:], eps=self._eps), angles)
        vectors, entries, index = cache.split(self._cache_sizes, dim=-1)
        vectors[batch.slots] = rotate_pairs(kernels.rms_norm(vector, self._kv_norm, self._eps), angles)
        asked = None
        if self._compressor:
            self._compressor.write(hidden, entries, batch)
        if self._indexer:
            self._indexer.compressor.write(hidden, index, batch)
            asked = self._indexer.ask(hidden, latent, angles)
        attended = torch.empty_like(query)
        for run in runs:
            positions = batch.positions[run.rows]
            keys, is_seen = self._window(vectors, run, positions)
            if self._compressor:
                more = self._compressor.entries(entries, run, frequencies)
                is_visible = torch.arange(len(more), device=cache.device) < (positions[:, None] + 1) // self._rate
                if self._indexer and asked:
                    index_keys = self._indexer.compressor.entries(index, run, frequencies)
                    index_query, weights = (part[run.rows] for part in asked)
                    is_visible = self._indexer.choose(index_query, weights, index_keys, is_visible)
                keys, is_seen = torch.cat((keys, more)), torch.cat((is_seen, is_visible), dim=1)
            attended[run.rows] = attend_with_sinks(query[run.rows], keys, is_seen, self._sinks)
        cos, sin = angles
        back = rotate_pairs(attended, (cos, -sin)).reshape(len(hidden), self._spec.output_groups, -1)
        return kernels.linear(torch.einsum("ngi,goi->ngo", back, self._grouped).flatten(1), self._output)

    def _window(self, vectors: Tensor, run: Run, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors that some row of the run sees, and which row sees which."""
        first = max(0, run.start - self._spec.window + 1)
        at = torch.arange(first, run.end, device=vectors.device)
        is_seen = (at <= positions[:, None]) & (at > positions[:, None] - self._spec.window)
        return vectors[run.slots[first:]], is_seen


def attend_with_sinks(query: Tensor, keys: Tensor, is_seen: Tensor, sinks: Tensor) -> Tensor:
    """Softmax attention of [n, H, D] over shared keys [T, D], which are the values too, in fp32: [n, H, D].

    Each head's sink [H] is a score without a value.
    """
    scores = torch.einsum("nhd,td->nht", query.float(), keys.float()) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~is_seen[:, None], -torch.inf)
    scores = torch.cat((scores, sinks[:, None].expand(*scores.shape[:2], 1)), dim=-1).softmax(dim=-1)
    return torch.einsum("nht,td->nhd", scores[..., :-1], keys.float()).to(query.dtype)


def runs_of(batch: AttentionBatch, block_size: int) -> list[Run]:
    """The sequences of a step, each with the slots of all of its tokens."""
    runs, start = [], 0
    for table, num_rows, end in zip(batch.block_table, batch.query_lens, batch.host_seq_lens, strict=True):
        at = torch.arange(end, device=table.device)
        slots = table[at // block_size] * block_size + at % block_size
        runs.append(Run(slice(start, start + num_rows), end - num_rows, end, slots))
        start += num_rows
    return runs


def angles_at(positions: Tensor, frequencies: Tensor) -> Angles:
    """Cosines and sines of positions [N]: fp32 [N, P / 2] each."""
    angles = positions[:, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate_pairs(x: Tensor, angles: Angles) -> Tensor:
    """Rotate neighbouring pairs at the end of the last dimension of [N, D] or [N, H, D]."""
    cos, sin = (part if x.dim() == 2 else part[:, None] for part in angles)
    plain, rotated = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), dim=-1)
    even, odd = rotated.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((plain, pairs.to(x.dtype)), dim=-1)


def _with_past(windows: Tensor, before_first: float) -> Tensor:
    """[E, m, 2 * D] -> [E, 2 * m, D]: the window before's first halves, then the own second halves."""
    past, own = windows.chunk(2, dim=-1)
    shifted = torch.cat((torch.full_like(past[:1], before_first), past[:-1]))
    return torch.cat((shifted, own), dim=1)
