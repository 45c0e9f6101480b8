"""Mixture-of-experts operations in Triton: routing, sorting by expert, grouped GEMMs, weighted sum.

The reference is the oracle of each. Grids depend on shapes only, so a CUDA graph can hold all of it. Shape legend as in
kernels.api. Knows no models.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import ExpertRows, Gate, Scoring

PAIR_TILE = 64  # pairs (row, expert) that a program ranks at once
MAX_CHUNKS = 64  # programs that share the sorting; each reads all their counts
NUM_PROGRAMS = 132  # one per streaming multiprocessor of an H100 or H200
ALIKE_PARTS = 8  # of a router whose sums do not depend on the number of rows
MAX_PLANES, MAX_PARTS, ROUTER_DEPTH = 3, 16, 64  # of a router: three bfloat16 hold the 24 bits of a float32


@dataclass(frozen=True)
class Tiling:
    """Block shape of a grouped GEMM, and how many warps and pipeline stages a program has."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def route(logits: Tensor, gate: Gate, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """See Kernels.route."""
    num_rows, num_experts = logits.shape[-2:]
    weights = logits.new_empty(num_rows, gate.num_selected)
    experts = torch.empty(num_rows, gate.num_selected, dtype=torch.int64, device=logits.device)
    if num_rows:
        _route[(num_rows,)](
            logits, logits if bias is None else bias, weights, experts, gate.scale, num_rows * num_experts,
            PARTS=logits.numel() // (num_rows * num_experts), EXPERTS=num_experts, GROUPS=gate.num_groups,
            GROUPS_PAD=triton.next_power_of_2(gate.num_groups),
            SIZE_PAD=triton.next_power_of_2(num_experts // gate.num_groups), SELECTED=gate.num_selected,
            SELECTED_PAD=triton.next_power_of_2(gate.num_selected), GROUPS_SELECTED=gate.num_groups_selected,
            BEST=gate.num_best_in_group, IS_SIGMOID=gate.scoring is Scoring.SIGMOID, HAS_BIAS=bias is not None,
            IS_NORMALIZED=gate.is_normalized, num_warps=1,
        )  # fmt: skip
    return weights, experts


def split_router(weight: Tensor) -> Tensor:
    """A router's float32 weight [E, hidden] as bfloat16 [T, E, hidden], T <= 3, whose exact sum it is.

    Products with bfloat16 rows are then exact on tensor cores, at a fraction of the time that fp32 takes.
    """
    planes: list[Tensor] = []
    rest = weight.float()
    while not planes or (len(planes) < MAX_PLANES and rest.any()):
        planes.append(rest.bfloat16())
        rest = rest - planes[-1].float()
    return torch.stack(planes)


def router_logits(x: Tensor, planes: Tensor, alike_rows: int = 0) -> Tensor:
    """See Kernels.router_logits; ``planes`` are those of ``split_router``. Few rows divide the depth into parts.

    With ``alike_rows`` the tiles have so many rows and the parts are ALIKE_PARTS, however many rows there are.
    """
    num_planes, num_experts, depth = planes.shape
    num_rows = len(x)
    tile_rows = alike_rows or (16 if num_rows <= 128 else 32 if num_rows <= 1024 else 64)
    tile_experts = min(64, max(16, triton.next_power_of_2(num_experts)))
    tiles = triton.cdiv(num_rows, tile_rows), triton.cdiv(num_experts, tile_experts)
    wanted = min(MAX_PARTS, triton.next_power_of_2(triton.cdiv(NUM_PROGRAMS, max(1, tiles[0] * tiles[1]))))
    wanted = ALIKE_PARTS if alike_rows else wanted
    part_depth = triton.cdiv(triton.cdiv(depth, wanted), ROUTER_DEPTH) * ROUTER_DEPTH
    parts = triton.cdiv(depth, part_depth)
    out = torch.empty(parts, num_rows, num_experts, dtype=torch.float32, device=x.device)
    if num_rows:
        _router_logits[(*tiles, parts)](
            x, planes, out, num_rows, x.stride(0), PLANES=num_planes, EXPERTS=num_experts, DEPTH=depth,
            PART_DEPTH=part_depth, TILE_ROWS=tile_rows, TILE_EXPERTS=tile_experts, TILE_DEPTH=ROUTER_DEPTH,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    return out


def sort_by_expert(experts: Tensor, num_experts: int, alignment: int) -> ExpertRows:
    """Exactly what reference_moe.sort_by_expert gives, in two launches."""
    num_pairs = experts.numel()
    num_rows = num_pairs + min(num_pairs, num_experts) * (alignment - 1)
    return _place(experts, num_experts, -(-num_rows // alignment) * alignment, alignment, room=0)


def place_by_expert(experts: Tensor, num_experts: int, room: int) -> tuple[ExpertRows, Tensor]:
    """Give each expert ``room`` rows, its pairs first (DeepGEMM's masked layout); with their counts, int32 [E].

    One row more than that takes the pairs with expert -1; nobody computes it. ``ends`` are those of the pairs.
    """
    rows = _place(experts, num_experts, num_experts * room + 1, 1, room=room)
    return rows, rows.ends - room * torch.arange(num_experts, dtype=torch.int32, device=experts.device)


def _place(experts: Tensor, num_experts: int, num_rows: int, alignment: int, *, room: int) -> ExpertRows:
    num_pairs, device = experts.numel(), experts.device
    sources = torch.empty(num_rows, dtype=torch.int64, device=device)
    expert_of = torch.empty(num_rows, dtype=torch.int32, device=device)
    ends = torch.zeros(num_experts, dtype=torch.int32, device=device)
    places = torch.empty(experts.shape, dtype=torch.int64, device=device)
    if num_pairs:
        tiles = triton.cdiv(num_pairs, PAIR_TILE * MAX_CHUNKS)  # of a program
        num_chunks = triton.cdiv(num_pairs, PAIR_TILE * tiles)
        counts = torch.empty(num_chunks, num_experts + 1, dtype=torch.int32, device=device)
        sizes = {"EXPERTS": num_experts, "EXPERTS_PAD": triton.next_power_of_2(num_experts), "TILE": PAIR_TILE}
        experts = experts.contiguous()
        _count_experts[(num_chunks,)](
            experts, counts, sources, expert_of, num_pairs, num_rows, tiles, triton.cdiv(num_rows, num_chunks),
            **sizes, num_warps=8,
        )  # fmt: skip
        _place_pairs[(num_chunks,)](
            experts, counts, sources, expert_of, ends, places, num_pairs, tiles, num_chunks, alignment,
            room, SELECTED=experts.shape[1], CHUNKS_PAD=triton.next_power_of_2(num_chunks), **sizes, num_warps=8,
        )  # fmt: skip
    return ExpertRows(sources, expert_of, ends, places)


def choose_tiling(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiling:
    """Tile rows near an expert's mean share of the pairs: few waste no arithmetic, many read weights less often."""
    if dtype == torch.float32:
        return Tiling(16, 32, 32, 4, 2)
    share = num_pairs / num_experts
    if share <= 8:
        return Tiling(16, 64, 128, 4, 4)
    if share <= 32:
        return Tiling(32, 128, 128, 4, 3)
    if share <= 64:
        return Tiling(64, 128, 64, 4, 4)
    return Tiling(128, 128, 64, 8, 3)


def gated_linear(x: Tensor, gate_up: Tensor, rows: ExpertRows, tiling: Tiling, limit: float = 0.0) -> Tensor:
    """silu(gate) * up of the gathered rows x[rows.sources] [X, hidden] and weights [E, 2I, hidden]: [X, I].

    ``rows`` is aligned to ``tiling.rows``; ``limit`` is that of Kernels.pack_experts, 0.0: none.
    """
    out = x.new_empty(len(rows.sources), gate_up.shape[1] // 2)
    _launch_grouped(x, gate_up, out, rows, tiling, is_gated=True, limit=limit)
    return out


def grouped_linear(x: Tensor, weight: Tensor, rows: ExpertRows, tiling: Tiling) -> Tensor:
    """See Kernels.grouped_linear; ``rows`` is aligned to ``tiling.rows``."""
    out = x.new_empty(len(x), weight.shape[1])
    _launch_grouped(x, weight, out, rows, tiling, is_gated=False)
    return out


def scatter_rows(x: Tensor, rows: ExpertRows) -> Tensor:
    """Copy each row of x [N, width] to its pairs' places, but the last: [X - 1, width], undefined elsewhere."""
    out = x.new_empty(len(rows.sources) - 1, x.shape[1])
    _launch_by_pair(x, out, rows, is_gated=False)
    return out


def silu_mul_rows(gate_up: Tensor, rows: ExpertRows) -> Tensor:
    """silu(first half) * second half of the pairs' rows of ``gate_up`` [X - 1, 2I]: [X - 1, I], undefined elsewhere."""
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    _launch_by_pair(gate_up, out, rows, is_gated=True)
    return out


def _launch_by_pair(x: Tensor, out: Tensor, rows: ExpertRows, *, is_gated: bool) -> None:
    width, num_pairs = out.shape[1], rows.places.numel()
    if num_pairs:
        _fill_places[(num_pairs, triton.cdiv(width, 2048))](
            x, out, rows.places, rows.experts, width, SELECTED=rows.places.shape[1], IS_GATED=is_gated, BLOCK=2048
        )


def combine(y: Tensor, weights: Tensor, rows: ExpertRows) -> Tensor:
    """Weighted sum over each row's slots, in slot order and fp32: y [X, hidden], weights [N, K] -> [N, hidden]."""
    num_rows, num_selected = weights.shape
    width = y.shape[1]
    out = y.new_empty(num_rows, width)
    if num_rows:
        block = min(1024, triton.next_power_of_2(width))
        _combine[(num_rows, triton.cdiv(width, block))](
            y, weights, rows.places, rows.experts, out, width, SELECTED=num_selected, BLOCK=block
        )
    return out


def _launch_grouped(
    x: Tensor, weight: Tensor, out: Tensor, rows: ExpertRows, tiling: Tiling, *, is_gated: bool, limit: float = 0.0
) -> None:
    num_experts, _, depth = weight.shape
    num_tiles = len(rows.sources) // tiling.rows
    if num_tiles:
        columns = out.shape[1]
        num_column_tiles = triton.cdiv(columns, tiling.columns)
        _grouped_linear[(num_tiles * num_column_tiles,)](
            x, weight, out, rows.sources, rows.ends, num_tiles, num_column_tiles,
            EXPERTS=num_experts, EXPERTS_PAD=triton.next_power_of_2(num_experts), COLUMNS=columns, DEPTH=depth,
            IS_GATED=is_gated, LIMIT=limit, TILE_ROWS=tiling.rows, TILE_COLUMNS=tiling.columns, TILE_DEPTH=tiling.depth,
            TILES_OF_A_GROUP=8, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _router_logits(
    x, planes, out, num_rows, row_stride,
    PLANES: tl.constexpr, EXPERTS: tl.constexpr, DEPTH: tl.constexpr, PART_DEPTH: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_EXPERTS: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    experts = tl.program_id(1) * TILE_EXPERTS + tl.arange(0, TILE_EXPERTS)
    part = tl.program_id(2)
    is_row, is_expert = rows < num_rows, experts < EXPERTS
    total = tl.zeros([TILE_ROWS, TILE_EXPERTS], tl.float32)
    for start in range(part * PART_DEPTH, tl.minimum(DEPTH, (part + 1) * PART_DEPTH), TILE_DEPTH):
        depths = start + tl.arange(0, TILE_DEPTH)
        inside = depths < DEPTH
        values = tl.load(
            x + rows[:, None] * row_stride + depths[None, :], mask=is_row[:, None] & inside[None, :], other=0.0
        )
        at = planes + experts[None, :] * DEPTH + depths[:, None]
        for plane in tl.static_range(PLANES):
            weights = tl.load(at + plane * EXPERTS * DEPTH, mask=is_expert[None, :] & inside[:, None], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
    target = out + (part * num_rows + rows[:, None]) * EXPERTS + experts[None, :]
    tl.store(target, total, mask=is_row[:, None] & is_expert[None, :])


@triton.jit
def _route(
    logits, bias, weights, experts, scale, part_stride,
    PARTS: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr, SIZE_PAD: tl.constexpr,
    SELECTED: tl.constexpr, SELECTED_PAD: tl.constexpr, GROUPS_SELECTED: tl.constexpr, BEST: tl.constexpr,
    IS_SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, IS_NORMALIZED: tl.constexpr,
):  # fmt: skip
    """One row: its experts as a tile of groups by members; the largest is taken again and again."""
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, GROUPS_PAD)[:, None], tl.arange(0, SIZE_PAD)[None, :]
    expert = group * size + member
    is_expert = (group < GROUPS) & (member < size)
    at = logits + row * EXPERTS + expert
    values = tl.load(at, mask=is_expert, other=float("-inf"))
    for part in tl.static_range(1, PARTS):
        values += tl.load(at + part * part_stride, mask=is_expert, other=0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        powers = tl.exp(values - tl.max(tl.max(values, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    ranking = scores
    if HAS_BIAS:
        ranking += tl.load(bias + expert, mask=is_expert, other=0.0)
    ranking = tl.where(is_expert, ranking, float("-inf"))
    if GROUPS > 1:
        rest = ranking
        group_scores = tl.max(rest, 1)
        for _ in tl.static_range(BEST - 1):
            rest = tl.where(member == tl.argmax(rest, 1)[:, None], float("-inf"), rest)
            group_scores += tl.max(rest, 1)
        groups = tl.arange(0, GROUPS_PAD)
        is_open = groups < 0
        for _ in tl.static_range(GROUPS_SELECTED):
            is_best = groups == tl.argmax(group_scores, 0)
            is_open = is_open | is_best
            group_scores = tl.where(is_best, float("-inf"), group_scores)
        ranking = tl.where(is_open[:, None], ranking, float("-inf"))
    slots = tl.arange(0, SELECTED_PAD)
    picked = tl.zeros([SELECTED_PAD], tl.int32)
    picked_scores = tl.zeros([SELECTED_PAD], tl.float32)
    for slot in tl.static_range(SELECTED):
        best = tl.max(tl.max(ranking, 1), 0)
        at = tl.min(tl.min(tl.where((ranking == best) & is_expert, expert, EXPERTS - 1), 1), 0)  # the lowest on ties
        is_chosen = (expert == at) & is_expert
        picked = tl.where(slots == slot, at, picked)
        picked_scores = tl.where(slots == slot, tl.sum(tl.sum(tl.where(is_chosen, scores, 0.0), 1), 0), picked_scores)
        ranking = tl.where(is_chosen, float("-inf"), ranking)
    if IS_NORMALIZED:
        picked_scores = picked_scores / (tl.sum(picked_scores, 0) + 1e-20)
    is_slot = slots < SELECTED
    tl.store(weights + row * SELECTED + slots, picked_scores * scale, mask=is_slot)
    tl.store(experts + row * SELECTED + slots, picked.to(tl.int64), mask=is_slot)


@triton.jit(do_not_specialize=["num_pairs", "num_rows", "tiles", "share"])
def _count_experts(
    experts, counts, sources, expert_of, num_pairs, num_rows, tiles, share,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count each expert's and nobody's pairs in this program's chunk, and fill its share of the rows with padding."""
    chunk = tl.program_id(0)
    columns = tl.arange(0, EXPERTS_PAD)
    total = tl.zeros([EXPERTS_PAD], tl.int32)
    num_void = 0
    for tile in range(tiles):
        pairs = (chunk * tiles + tile) * TILE + tl.arange(0, TILE)
        expert = tl.load(experts + pairs, mask=pairs < num_pairs, other=EXPERTS_PAD).to(tl.int32)
        total += tl.sum((expert[:, None] == columns[None, :]).to(tl.int32), 0)
        num_void += tl.sum((expert < 0).to(tl.int32), 0)
    tl.store(counts + chunk * (EXPERTS + 1) + columns, total, mask=columns < EXPERTS)
    tl.store(counts + chunk * (EXPERTS + 1) + EXPERTS, num_void)
    for start in range(0, share, 1024):
        rows = start + tl.arange(0, 1024)
        inside = (rows < share) & (chunk * share + rows < num_rows)
        tl.store(sources + chunk * share + rows, tl.zeros([1024], tl.int64), mask=inside)
        tl.store(expert_of + chunk * share + rows, tl.full([1024], -1, tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_pairs", "tiles", "num_chunks", "alignment", "room"])
def _place_pairs(
    experts, counts, sources, expert_of, ends, places, num_pairs, tiles, num_chunks, alignment, room,
    SELECTED: tl.constexpr, CHUNKS_PAD: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Place this program's pairs after those of earlier chunks in their experts' runs."""
    chunk = tl.program_id(0)
    columns, chunks = tl.arange(0, EXPERTS_PAD), tl.arange(0, CHUNKS_PAD)
    all_counts = tl.load(
        counts + chunks[:, None] * (EXPERTS + 1) + columns[None, :],
        mask=(chunks < num_chunks)[:, None] & (columns < EXPERTS)[None, :],
        other=0,
    )
    padded = (tl.sum(all_counts, 0) + alignment - 1) // alignment * alignment
    run_ends = tl.cumsum(padded, 0)
    if room > 0:
        run_ends = columns * room + padded
    if chunk == 0:
        tl.store(ends + columns, run_ends, mask=columns < EXPERTS)
    place = run_ends - padded + tl.sum(tl.where((chunks < chunk)[:, None], all_counts, 0), 0)
    void_place = tl.sum(padded, 0) + tl.sum(
        tl.load(counts + chunks * (EXPERTS + 1) + EXPERTS, mask=chunks < chunk, other=0), 0
    )
    for tile in range(tiles):
        pairs = (chunk * tiles + tile) * TILE + tl.arange(0, TILE)
        is_pair = pairs < num_pairs
        expert = tl.load(experts + pairs, mask=is_pair, other=EXPERTS_PAD).to(tl.int32)
        is_void = (expert < 0).to(tl.int32)
        is_its = (expert[:, None] == columns[None, :]).to(tl.int32)
        before = tl.cumsum(is_its, 0) - is_its
        target = tl.sum(is_its * (before + place[None, :]), 1)
        target += is_void * (void_place + tl.cumsum(is_void, 0) - 1)
        if room > 0:
            target = tl.where(is_void > 0, EXPERTS * room, target)
        target = target.to(tl.int64)
        tl.store(places + pairs, target, mask=is_pair)
        tl.store(sources + target, (pairs // SELECTED).to(tl.int64), mask=is_pair)
        tl.store(expert_of + target, expert, mask=is_pair)
        place += tl.sum(is_its, 0)
        void_place += tl.sum(is_void, 0)


@triton.jit(do_not_specialize=["num_tiles"])
def _grouped_linear(
    x, weight, out, sources, ends, num_tiles, num_column_tiles,
    EXPERTS: tl.constexpr, EXPERTS_PAD: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    IS_GATED: tl.constexpr, LIMIT: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr, TILES_OF_A_GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's run. Gated: rows are gathered, and a gate and an up column meet in one output column.

    Tiles of rows come in groups that walk all columns, so that rows and weights are read while they are in cache.
    """
    program = tl.program_id(0)
    in_group = TILES_OF_A_GROUP * num_column_tiles
    first_tile = program // in_group * TILES_OF_A_GROUP
    group_tiles = tl.minimum(num_tiles - first_tile, TILES_OF_A_GROUP)
    start = (first_tile + program % in_group % group_tiles) * TILE_ROWS
    column_tile = program % in_group // group_tiles
    experts = tl.arange(0, EXPERTS_PAD)
    run_ends = tl.load(ends + experts, mask=experts < EXPERTS, other=2**31 - 1)
    expert = tl.sum((run_ends <= start).to(tl.int32), 0).to(tl.int64)
    if expert >= EXPERTS:
        return
    rows = (start + tl.arange(0, TILE_ROWS)).to(tl.int64)
    columns, depths = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS), tl.arange(0, TILE_DEPTH)
    source = tl.load(sources + rows) if IS_GATED else rows
    inside = columns < COLUMNS
    weight_columns = tl.where(inside, columns, 0)
    x_at = x + source[:, None] * DEPTH + depths[None, :]
    height: tl.constexpr = COLUMNS * 2 if IS_GATED else COLUMNS
    weight_at = weight + expert * height * DEPTH + weight_columns[None, :] * DEPTH + depths[:, None]
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    total_up = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for depth in range(0, DEPTH, TILE_DEPTH):
        if DEPTH % TILE_DEPTH == 0:
            values = tl.load(x_at)
            total = tl.dot(values, tl.load(weight_at), total, input_precision="ieee")
            if IS_GATED:
                total_up = tl.dot(values, tl.load(weight_at + COLUMNS * DEPTH), total_up, input_precision="ieee")
        else:
            is_left = depth + depths < DEPTH
            values = tl.load(x_at, mask=is_left[None, :], other=0.0)
            total = tl.dot(values, tl.load(weight_at, mask=is_left[:, None], other=0.0), total, input_precision="ieee")
            if IS_GATED:
                ups = tl.load(weight_at + COLUMNS * DEPTH, mask=is_left[:, None], other=0.0)
                total_up = tl.dot(values, ups, total_up, input_precision="ieee")
        x_at += TILE_DEPTH
        weight_at += TILE_DEPTH
    if IS_GATED:
        if LIMIT > 0:
            total = tl.minimum(total, LIMIT)
            total_up = tl.minimum(tl.maximum(total_up, -LIMIT), LIMIT)
        total = total * tl.sigmoid(total) * total_up
    at = out + rows[:, None] * COLUMNS + columns[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[None, :])


@triton.jit
def _fill_places(x, out, places, expert_of, width, SELECTED: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr):
    pair, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    place = tl.load(places + pair)
    if tl.load(expert_of + place) >= 0:
        if IS_GATED:
            gate = tl.load(x + place * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + place * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
            values = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        else:
            values = tl.load(x + pair // SELECTED * width + columns, mask=inside, other=0.0)
        tl.store(out + place * width + columns, values, mask=inside)


@triton.jit
def _combine(y, weights, places, expert_of, out, width, SELECTED: tl.constexpr, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(SELECTED):
        place = tl.load(places + row * SELECTED + slot)
        if tl.load(expert_of + place) >= 0:
            values = tl.load(y + place * width + columns, mask=inside, other=0.0).to(tl.float32)
            total += values * tl.load(weights + row * SELECTED + slot)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)
