"""Attention of DeepSeek V4: a window of the last tokens, and beyond it entries that stand for several tokens each.

All heads share one vector a token, key and value at once. State lies at the slot of its position, so that a prefix is
shared, and a rejected token overwritten, like any other; a window's entry lies at the slot of its last token.
Shape legend: N rows of a step; S sequences, n rows and T tokens of each; H heads, D head size, K keys, E entries, m
tokens of an entry.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.device import to_device
from engine.models import WeightSource
from engine.models.spec import ModelSpec
from kernels.api import AttentionBatch, Kernels

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [N, P / 2] of rows' positions."""

MAX_GROUP_TOKENS, MAX_GROUP_ROWS = 2**18, 256
"""Of sequences that attend together: bounds what is gathered, and the scores."""


class Group(NamedTuple):
    """S sequences of a step, next to each other, with n rows each."""

    rows: slice  # of the step
    positions: Tensor  # int64 [S, n]
    slots: Tensor  # int64 [S, T]: of positions 0 .. T - 1, T the most that one of them has; any behind a shorter one


class Closing(NamedTuple):
    """The C windows of m tokens that end in a step."""

    own: Tensor  # int64 [C, m]: slots of their tokens
    past: Tensor  # int64 [C, m]: of the window before; any where there is none
    has_past: Tensor  # bool [C]
    starts: Tensor  # int64 [C]: position of the first token


class Layout(NamedTuple):
    """What all layers of a step have in common."""

    groups: list[Group]
    closings: dict[int, Closing]  # by rate; only those that close a window


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

    def close(self, cache: Tensor, layout: Layout, frequencies: Tensor) -> None:
        """Make the entries of the windows that the step closes."""
        if not (closing := layout.closings.get(self.rate)):
            return
        raw = cache[:, : self._raw_size]
        vectors, gates = raw[closing.own].chunk(2, dim=-1)
        gates = gates.float() + self._bias
        if self._overlaps:
            past_vectors, past_gates = raw[closing.past].chunk(2, dim=-1)
            past_gates = (past_gates.float() + self._bias).where(closing.has_past[:, None, None], -torch.inf)
            vectors = torch.cat((past_vectors[..., : self._size], vectors[..., self._size :]), dim=1)
            gates = torch.cat((past_gates[..., : self._size], gates[..., self._size :]), dim=1)
        mixed = (vectors * gates.softmax(dim=1).to(vectors.dtype)).sum(dim=1)
        made = self._kernels.rms_norm(mixed, self._norm, self._eps)
        cache[closing.own[:, -1], self._raw_size :] = rotate_pairs(made, angles_at(closing.starts, frequencies))

    def entries(self, cache: Tensor, group: Group) -> Tensor:
        """All entries of each sequence: [S, E, D]; any behind a shorter one's."""
        return cache[:, self._raw_size :][group.slots[:, self.rate - 1 :: self.rate]]


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
        """Which of the visible entries each row attends to: bool [S, n, E]."""
        if entries.shape[1] <= self._spec.index_topk:
            return is_visible
        scores = torch.einsum("snhd,sed->snhe", query.float(), entries.float()).relu() * query.shape[-1] ** -0.5
        scores = (scores * (weights.float() * self._spec.index_heads**-0.5)[..., None]).sum(dim=2)
        best = scores.masked_fill(~is_visible, -torch.inf).topk(self._spec.index_topk, dim=-1).indices
        return is_visible & torch.zeros_like(is_visible).scatter_(-1, best, True)


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
        self._q_norm, self._kv_norm = (source.get(f"{prefix}{name}.weight") for name in ("q_norm", "kv_norm"))
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
        self, hidden: Tensor, frequencies: Tensor, batch: AttentionBatch, layout: Layout, cache: Tensor
    ) -> Tensor:
        """Normed rows [N, hidden] -> [N, hidden]; ``cache`` is [slots, cache_width]."""
        kernels, angles = self._kernels, angles_at(batch.positions, frequencies)
        latent, vector = kernels.linear(hidden, self._down).split(self._sizes, dim=-1)
        latent = kernels.rms_norm(latent, self._q_norm, self._eps)
        query = kernels.linear(latent, self._query).unflatten(-1, (self._num_heads, self._head_dim))
        query = rotate_pairs(functional.rms_norm(query, query.shape[2:], eps=self._eps), angles)
        vectors, entries, index = cache.split(self._cache_sizes, dim=-1)
        vectors[batch.slots] = rotate_pairs(kernels.rms_norm(vector, self._kv_norm, self._eps), angles)
        index_query = weights = query
        if self._compressor:
            self._compressor.write(hidden, entries, batch)
            self._compressor.close(entries, layout, frequencies)
        if self._indexer:
            self._indexer.compressor.write(hidden, index, batch)
            self._indexer.compressor.close(index, layout, frequencies)
            index_query, weights = self._indexer.ask(hidden, latent, angles)
        attended = torch.empty_like(query)
        for group in layout.groups:
            by_sequence = group.positions.shape
            keys, is_seen = self._window(vectors, group)
            if self._compressor:
                more = self._compressor.entries(entries, group)
                num_closed = (group.positions + 1) // self._rate
                is_visible = torch.arange(more.shape[1], device=cache.device) < num_closed[..., None]
                if self._indexer:
                    asked, shares = (part[group.rows].unflatten(0, by_sequence) for part in (index_query, weights))
                    index_keys = self._indexer.compressor.entries(index, group)
                    is_visible = self._indexer.choose(asked, shares, index_keys, is_visible)
                keys, is_seen = torch.cat((keys, more), dim=1), torch.cat((is_seen, is_visible), dim=2)
            rows = query[group.rows].unflatten(0, by_sequence)
            attended[group.rows] = attend_with_sinks(rows, keys, is_seen, self._sinks).flatten(0, 1)
        cos, sin = angles
        back = rotate_pairs(attended, (cos, -sin)).reshape(len(hidden), self._spec.output_groups, -1)
        return kernels.linear(torch.einsum("ngi,goi->ngo", back, self._grouped).flatten(1), self._output)

    def _window(self, vectors: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        """The vectors [S, K, D] that some row of a sequence sees, and which row sees which: bool [S, n, K]."""
        positions, window = group.positions, self._spec.window
        before = torch.arange(positions.shape[1] + window - 1, device=vectors.device) - (window - 1)
        at = positions[:, :1] + before  # [S, K]
        behind = positions[..., None] - at[:, None]
        is_seen = (at >= 0)[:, None] & (behind >= 0) & (behind < window)
        return vectors[group.slots.gather(1, at.clamp(min=0))], is_seen


def attend_with_sinks(query: Tensor, keys: Tensor, is_seen: Tensor, sinks: Tensor) -> Tensor:
    """Softmax attention of [S, n, H, D] over shared keys [S, K, D], the values too, in fp32: [S, n, H, D].

    Each head's sink [H] is a score without a value.
    """
    keys = keys.float()
    scores = torch.einsum("snhd,skd->snhk", query.float(), keys) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~is_seen[:, :, None], -torch.inf)
    scores = torch.cat((scores, sinks[:, None].expand(*scores.shape[:3], 1)), dim=-1).softmax(dim=-1)
    return torch.einsum("snhk,skd->snhd", scores[..., :-1], keys).to(query.dtype)


def lay_out(batch: AttentionBatch, block_size: int, rates: Iterable[int]) -> Layout:
    """Group a step's rows, and find the windows of ``rates`` tokens that it closes."""

    def slots_at(sequences: Tensor, positions: Tensor) -> Tensor:
        return batch.block_table[sequences, positions // block_size] * block_size + positions % block_size

    device, ends = batch.block_table.device, np.asarray(batch.host_seq_lens, dtype=np.int64)
    groups = []
    for sequences, rows, end in _pieces(batch):
        positions = batch.positions[rows].view(sequences.stop - sequences.start, -1)
        numbers = torch.arange(sequences.start, sequences.stop, device=device)[:, None]
        groups.append(Group(rows, positions, slots_at(numbers, torch.arange(end, device=device))))
    closings = {}
    starts = ends - np.asarray(batch.query_lens, dtype=np.int64)
    for rate in rates:
        counts = ends // rate - starts // rate
        if total := int(counts.sum()):
            number = np.arange(total) - np.repeat(counts.cumsum() - counts, counts) + np.repeat(starts // rate, counts)
            arrays = to_device({"sequence": np.repeat(np.arange(len(ends)), counts), "number": number}, device)
            first = arrays["number"] * rate
            at = first[:, None] + torch.arange(rate, device=device)
            own, past = (slots_at(arrays["sequence"][:, None], part) for part in (at, (at - rate).clamp(min=0)))
            closings[rate] = Closing(own, past, first > 0, first)
    return Layout(groups, closings)


def _pieces(batch: AttentionBatch) -> Iterator[tuple[slice, slice, int]]:
    """Sequences, rows of the step and most tokens of each group: decodes together, other runs in pieces."""
    first, longest = 0, 0
    for number, end in enumerate(batch.host_seq_lens[: batch.num_decodes]):
        if number > first and (number + 1 - first) * max(longest, end) > MAX_GROUP_TOKENS:
            yield slice(first, number), slice(first, number), longest
            first, longest = number, 0
        longest = max(longest, end)
    if batch.num_decodes:
        yield slice(first, batch.num_decodes), slice(first, batch.num_decodes), longest
    start = batch.num_decodes
    for number in range(batch.num_decodes, len(batch.query_lens)):
        last = start + batch.query_lens[number]
        for row in range(start, last, MAX_GROUP_ROWS):
            stop = min(last, row + MAX_GROUP_ROWS)
            yield slice(number, number + 1), slice(row, stop), batch.host_seq_lens[number] - (last - stop)
        start = last


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
