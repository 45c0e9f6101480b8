"""Batch-invariant operations in plain torch: a row's bits depend on no other row, and not on how many there are.

Products run on tiles of a fixed shape, so that no library picks another order of summation for another number of
rows; attention splits keys by absolute position, and adds the parts up in order. Shape legend as in kernels.reference,
plus T tiles of QUERY_TILE rows. The guarantee is for one machine: other hardware or threads may sum in another order.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.api import AttentionBatch, ExpertRows, Gate, SamplingBatch, Scoring
from kernels.reference import PackedWeight, ReferenceKernels
from kernels.reference_mla import UpProjection, absorb, project_values
from kernels.reference_moe import pick, score

ROW_TILE = 16
"""Rows of every product: below, a lone row costs less and many rows read the weight more often."""

QUERY_TILE = 4
"""Rows of a sequence that attend together; a decoding sequence fills its tile up with copies of its one row."""

KEY_SPLIT = 64
"""Keys that are scored together: positions 0 to 63, 64 to 127 and so on, whatever rows ask."""

MAX_SCORES = 2**24
"""Scores held at once, in numbers of fp32."""

PIECE = 2**14
"""Elements that torch computes in one thread, of which a multiple of LANES leaves no rest behind the last vector."""

LANES = 64


@dataclass(frozen=True)
class Tiles:
    """The rows of a step in tiles of one sequence each, those with most keys first; the same for all layers."""

    rows: Tensor  # int64 [T, QUERY_TILE]; a tile that is not full repeats its last row
    is_real: Tensor  # bool [T, QUERY_TILE]
    positions: Tensor  # int64 [T, QUERY_TILE]
    slots: Tensor  # int64 [T, keys]: where the key of each position lies; any beyond the tile's own
    num_splits: tuple[int, ...]  # [T], descending: how many KEY_SPLITs of keys a tile sees


class InvariantKernels(ReferenceKernels):
    """The operations of ReferenceKernels of which a row's result could depend on the batch."""

    name = "invariant"
    row_alignment = ROW_TILE

    def __init__(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float32, *, is_fp8: bool = False
    ) -> None:
        super().__init__(device, dtype, is_fp8=is_fp8)
        self._tiles: tuple[AttentionBatch, int, Tiles] | None = None  # of the last step, for all layers

    @property
    def unrecordable(self) -> frozenset[str]:
        """See Kernels.unrecordable."""
        return frozenset({"attention", "latent_attention", "experts_mlp"})

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """See Kernels.linear."""
        return by_tiles(lambda tile: super(InvariantKernels, self).linear(tile, packed), x)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """In operations that round each value once."""
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels.silu_mul."""
        gate, up = gate_up.chunk(2, dim=-1)
        return by_lanes(functional.silu, gate).mul_(up)

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """See Kernels.attention."""
        keys, values = cache.flatten(1, 2)
        tiles = self._tiles_of(batch, cache.shape[2])
        return attend_tiles(q, keys, values, tiles, scale=scale, window=window)

    def latent_attention(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: UpProjection, *, scale: float
    ) -> Tensor:
        """See Kernels.latent_attention; every row absorbs, since the other form rounds differently."""
        latents = cache.flatten(0, 1)
        absorbed = by_tiles(lambda some, rotated: absorb(some, rotated, up), q, q_rope)
        tiles, rank = self._tiles_of(batch, cache.shape[1]), up.values.shape[2]
        attended = attend_tiles(absorbed, latents, latents[..., :rank], tiles, scale=scale)
        return by_tiles(lambda tile: project_values(tile, up), attended)

    def router_logits(self, x: Tensor, packed: Tensor) -> Tensor:
        """See Kernels.router_logits."""
        return by_tiles(lambda tile: super(InvariantKernels, self).router_logits(tile, packed), x)

    def route(self, logits: Tensor, gate: Gate, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Kernels.route."""
        scoring = partial(score, scoring=gate.scoring)
        is_elementwise = gate.scoring is not Scoring.SOFTMAX
        return pick(by_lanes(scoring, logits) if is_elementwise else scoring(logits), gate, bias)

    def grouped_linear(self, x: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        """See Kernels.grouped_linear: a tile has rows of one expert, as ``row_alignment`` sees to."""
        out = x.new_zeros(len(x), weight.shape[1])
        for start, expert in enumerate(rows.experts[::ROW_TILE].tolist()):
            if expert >= 0:
                tile = slice(start * ROW_TILE, (start + 1) * ROW_TILE)
                out[tile] = functional.linear(x[tile], weight[expert])
        return out

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """See Kernels.sample; each row alone."""
        return sample_rows(super().sample, logits, batch)

    def _tiles_of(self, batch: AttentionBatch, block_size: int) -> Tiles:
        if self._tiles is None or self._tiles[0] is not batch or self._tiles[1] != block_size:
            self._tiles = batch, block_size, make_tiles(batch, block_size)
        return self._tiles[2]


def sample_rows(
    sample: Callable[[Tensor, SamplingBatch], tuple[Tensor, Tensor]], logits: Tensor, batch: SamplingBatch
) -> tuple[Tensor, Tensor]:
    """``sample`` of each row alone."""
    if len(logits) < 2:
        return sample(logits, batch)
    drawn = [sample(row, _row_of(batch, index)) for index, row in enumerate(logits.split(1))]
    tokens, logprobs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def by_tiles(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Apply a function of rows to ROW_TILE rows of each input [N, ...] at a time, the last ones padded with zeros."""
    num_rows = len(inputs[0])
    padding = -num_rows % ROW_TILE
    padded = [torch.cat((x, x.new_zeros(padding, *x.shape[1:]))) for x in inputs]
    return torch.cat([function(*tile) for tile in zip(*(x.split(ROW_TILE) for x in padded), strict=True)])[:num_rows]


def by_lanes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function so that where a value lies does not matter.

    On a CPU torch has other code, which rounds differently, for what does not fill a vector at the end of a thread's
    share (seen with silu, sigmoid and softplus in torch 2.13): there are no such rests here.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = functional.pad(x.flatten(), (0, -x.numel() % LANES))
    return torch.cat([function(piece) for piece in flat.split(PIECE)])[: x.numel()].view(x.shape)


def make_tiles(batch: AttentionBatch, block_size: int) -> Tiles:
    """Cut the runs of a step into tiles of rows."""
    device, starts, rows, owners = batch.positions.device, 0, [], []
    for owner, num_rows in enumerate(batch.query_lens):
        for first in range(starts, starts + num_rows, QUERY_TILE):
            rows.append([first + i if first + i < starts + num_rows else -1 for i in range(QUERY_TILE)])
            owners.append(owner)
        starts += num_rows
    ends = [batch.host_seq_lens[owner] for owner in owners]
    order = sorted(range(len(rows)), key=lambda tile: -ends[tile])
    index = torch.tensor([rows[tile] for tile in order], device=device).view(-1, QUERY_TILE)
    is_real = index >= 0
    index = torch.where(is_real, index, index[:, :1])
    num_splits = tuple(-(-ends[tile] // KEY_SPLIT) for tile in order)
    keys = torch.arange(max(num_splits, default=0) * KEY_SPLIT, device=device)
    table = batch.block_table[torch.tensor([owners[tile] for tile in order], dtype=torch.int64, device=device)]
    blocks = table[:, (keys // block_size).clamp(max=table.shape[1] - 1)]
    return Tiles(index, is_real, batch.positions[index], blocks * block_size + keys % block_size, num_splits)


def attend_tiles(
    q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of q [N, H, D] over keys [slots, G, D] and values [slots, G, Dv]: [N, H, Dv]."""
    out = q.new_empty(*q.shape[:2], values.shape[2])
    start = 0
    while start < len(tiles.num_splits):
        size = q.shape[1] * QUERY_TILE * tiles.num_splits[start] * KEY_SPLIT
        end = min(len(tiles.num_splits), start + max(1, MAX_SCORES // size))
        some = Tiles(*(getattr(tiles, field.name)[start:end] for field in fields(tiles)))
        attended = _attend(q, keys, values, some, scale=scale, window=window)
        out[some.rows[some.is_real]] = attended[some.is_real]
        start = end
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, *, scale: float, window: int | None) -> Tensor:
    """Attention of some tiles: [T, QUERY_TILE, H, Dv]."""
    num_tiles, num_groups, num_splits = len(tiles.num_splits), keys.shape[1], tiles.num_splits[0]
    grouped = q[tiles.rows].float().unflatten(2, (num_groups, -1)).transpose(1, 2)  # [T, G, QUERY_TILE, R, D]
    queries = grouped.flatten(2, 3).flatten(0, 1)
    scores = queries.new_full((*queries.shape[:2], num_splits * KEY_SPLIT), -torch.inf)
    splits = [slice(index * KEY_SPLIT, (index + 1) * KEY_SPLIT) for index in range(num_splits)]
    active = [sum(count > index for count in tiles.num_splits) for index in range(num_splits)]
    for split, count in zip(splits, active, strict=True):
        scores[: count * num_groups, :, split] = torch.bmm(
            queries[: count * num_groups], _gather(keys, tiles.slots[:count, split]).mT
        )
    positions = torch.arange(num_splits * KEY_SPLIT, device=q.device)
    is_hidden = positions > tiles.positions[..., None]
    if window is not None:
        is_hidden |= positions <= tiles.positions[..., None] - window
    by_row = scores.view(num_tiles, num_groups, QUERY_TILE, -1, len(positions))
    by_row.mul_(scale).masked_fill_(is_hidden[:, None, :, None], -torch.inf)
    scores = scores.softmax(dim=-1)  # row by row: what is hidden behind a row's last key adds zeros
    out = queries.new_zeros(*queries.shape[:2], values.shape[2])
    for split, count in zip(splits, active, strict=True):
        part = torch.bmm(scores[: count * num_groups, :, split], _gather(values, tiles.slots[:count, split]))
        out[: count * num_groups] += part
    return out.view(num_tiles, num_groups, QUERY_TILE, -1, values.shape[2]).transpose(1, 2).flatten(2, 3).to(q.dtype)


def _gather(side: Tensor, slots: Tensor) -> Tensor:
    """Copy keys or values [slots, G, D] at ``slots`` [T, KEY_SPLIT]: fp32 [T * G, KEY_SPLIT, D]."""
    return side[slots].float().transpose(1, 2).flatten(0, 1)


def _row_of(batch: SamplingBatch, row: int) -> SamplingBatch:
    values = ((field.name, getattr(batch, field.name)) for field in fields(batch))
    some: dict[str, Any] = {name: value[row : row + 1] for name, value in values if isinstance(value, Tensor)}
    return replace(batch, **some)
