"""Every operation in plain torch: the oracle that other backends are tested against, and the CPU engine.

Decode rows that share leading blocks read the shared keys and values once; partial results merge by their log-sum-exp.
Shape legend as in kernels.api, plus R = H / G query heads of a group. Knows nothing of models or requests.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.api import BLOCK_SIZE, AttentionBatch, ExpertRows, Gate, HeadNorms, SamplingBatch
from kernels.reference_fp8 import round_blocks, round_rows
from kernels.reference_hyper import sinkhorn
from kernels.reference_mla import UpProjection, absorb, attend_rows, project_values, split_up_projection
from kernels.reference_moe import PackedExperts, combine, grouped_linear, limit_gates, pick, score, sort_by_expert
from kernels.sampling import sample

MIN_SHARERS = 4
"""Decode sequences that must share a prefix before reading it separately pays for the merge."""

MAX_GATHER_TOKENS = 8_192
"""Keys copied out of the cache at once: bounds a decode step's memory, and what is copied is read while in cache."""


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight, in oneDNN's layout if ``is_prepacked``, and its bias."""

    weight: Tensor
    bias: Tensor | None
    is_prepacked: bool
    is_fp8: bool = False  # the weight stands for fp8 codes, and what it multiplies is rounded to such


@dataclass(frozen=True)
class Layout:
    """What a plan depends on beside the batch."""

    block_size: int
    dtype: torch.dtype  # of queries and masks
    window: int | None


@dataclass(frozen=True)
class DecodeGroup:
    """Decode sequences computed together: same leading blocks, similar number of own blocks."""

    members: Tensor  # int64 [S']: indices of sequences, which are also their rows
    shared_blocks: Tensor  # int64 [P]; every member's prefix, full blocks
    own_blocks: Tensor  # int64 [S', M']
    own_mask: Tensor  # [S', 1, 1, M' * B] added to the scores: 0 or -inf


@dataclass(frozen=True)
class PrefillPart:
    """A sequence with several rows. ``mask`` [rows, keys] is None where plain causality over all keys holds."""

    rows: slice
    blocks: Tensor  # int64 [M']
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """What a step gathers; the same for all layers of one window."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillPart, ...]


class ReferenceKernels:
    """Operations in torch for any device; on a CPU with oneDNN-prepacked weights where that works for ``dtype``."""

    name = "reference"
    row_alignment = 1

    def __init__(
        self, device: torch.device | None = None, dtype: torch.dtype = torch.float32, *, is_fp8: bool = False
    ) -> None:
        """``is_fp8``: projections and experts compute what fp8 codes stand for, at the speed of ``dtype``."""
        self.dtype = dtype
        self.is_fp8 = is_fp8
        self.can_prepack = (device is None or device.type == "cpu") and can_prepack(dtype)
        self._plan: tuple[AttentionBatch, Layout, AttentionPlan] | None = None  # of the last step, for all layers

    @property
    def unrecordable(self) -> frozenset[str]:
        """See Kernels.unrecordable."""
        names = {"attention", "latent_attention"}
        return frozenset(names if self.dtype == torch.bfloat16 else names | {"experts_mlp"})

    @property
    def prefix_sharing(self) -> frozenset[str]:
        """See Kernels.prefix_sharing; shared prefixes are found on the host here."""
        return frozenset()

    @property
    def decode_only(self) -> frozenset[str]:
        """See Kernels.decode_only."""
        return frozenset({"attention", "latent_attention"})

    def latent_block_size(self, num_heads: int) -> int:
        """See Kernels.latent_block_size."""
        return BLOCK_SIZE

    def pack_weight(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """See Kernels.pack_weight; copies the weight when it prepacks."""
        if self.can_prepack and weight.device.type == "cpu" and weight.dtype == self.dtype:
            return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias, True)
        return PackedWeight(weight, bias, False)

    def pack_projection(self, weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
        """See Kernels.pack_projection."""
        if not self.is_fp8:
            return self.pack_weight(weight, bias)
        return replace(self.pack_weight(round_blocks(weight), bias), is_fp8=True)

    def linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """See Kernels.linear."""
        if packed.is_fp8:
            x = round_rows(x)
        if packed.is_prepacked:
            return torch.ops.mkldnn._linear_pointwise(x, packed.weight, packed.bias, "none", [], "")
        return functional.linear(x, packed.weight, packed.bias)

    def wide_linear(self, x: Tensor, packed: PackedWeight) -> Tensor:
        """See Kernels.wide_linear."""
        return self.linear(x, packed).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm; overwrites ``residual``."""
        residual = residual.add_(x)
        return self.rms_norm(residual, weight, eps), residual

    def rotary(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.rotary."""
        if norms:
            q, k = self.rms_norm(q, norms.q, norms.eps), self.rms_norm(k, norms.k, norms.eps)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[:, None], sin[:, None]
        half = x.shape[-1] // 2
        rotated = x * cos
        rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return rotated

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels.silu_mul."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def rotary_write_kv(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: tuple[Tensor, Tensor], *, cache: Tensor, slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:  # fmt: skip
        """See Kernels.rotary_write_kv."""
        q, k = self.rotary(q, k, *cos_sin, norms)
        self.write_kv(cache, slots, k, v)
        return q

    def write_kv(self, cache: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See Kernels.write_kv."""
        keys, values = cache.flatten(1, 2)
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def attention(
        self, q: Tensor, cache: Tensor, batch: AttentionBatch, *, scale: float, window: int | None = None
    ) -> Tensor:
        """See Kernels.attention."""
        plan = self._plan_for(batch, Layout(cache.shape[2], q.dtype, window))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)  # q may be a view of the fused projection
        for group in plan.decodes:
            _attend_decodes(q, cache, group, scale, out)
        for part in plan.prefills:
            _attend_prefill(q, cache, part, scale, out)
        return out

    def write_latent(self, cache: Tensor, slots: Tensor, latent: Tensor, k_rope: Tensor) -> None:
        """See Kernels.write_latent."""
        cache.flatten(0, 2).index_copy_(0, slots, torch.cat((latent, k_rope), dim=-1))

    def pack_up_projection(self, weight: Tensor, num_heads: int, key_size: int) -> UpProjection:
        """See Kernels.pack_up_projection."""
        return split_up_projection(weight, num_heads, key_size)

    def latent_attention(
        self, q: Tensor, q_rope: Tensor, cache: Tensor, batch: AttentionBatch, up: UpProjection, *, scale: float
    ) -> Tensor:
        """See Kernels.latent_attention; decodes are grouped attention with one head whose value is its key."""
        plan = self._plan_for(batch, Layout(cache.shape[1], q.dtype, None))
        out = q.new_empty(len(q), *up.values.shape[:2])
        if decodes := batch.num_decodes:
            absorbed = absorb(q[:decodes], q_rope[:decodes], up)
            latents = torch.empty_like(absorbed)
            for group in plan.decodes:
                _attend_decodes(absorbed, cache.expand(2, *cache.shape), group, scale, latents)
            out[:decodes] = project_values(latents[..., : up.values.shape[2]], up)
        for part in plan.prefills:
            keys = cache.index_select(0, part.blocks).flatten(0, 2)[: part.num_keys]
            out[part.rows] = attend_rows(q[part.rows], q_rope[part.rows], keys, up, mask=part.mask, scale=scale)
        return out

    def pack_router(self, weight: Tensor) -> Tensor:
        """See Kernels.pack_router."""
        return weight

    def router_logits(self, x: Tensor, packed: Tensor) -> Tensor:
        """See Kernels.router_logits."""
        return functional.linear(x.float(), packed)

    def route(self, logits: Tensor, gate: Gate, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See Kernels.route."""
        return pick(score(logits, gate.scoring), gate, bias)

    def pack_experts(self, gate_up: Tensor, down: Tensor, limit: float | None = None) -> PackedExperts:
        """See Kernels.pack_experts."""
        if self.is_fp8:
            return PackedExperts(round_blocks(gate_up), round_blocks(down), is_fp8=True, limit=limit)
        return PackedExperts(gate_up, down, limit=limit)

    def grouped_linear(self, x: Tensor, weight: Tensor, rows: ExpertRows) -> Tensor:
        """See Kernels.grouped_linear."""
        return grouped_linear(x, weight, rows)

    def experts_mlp(self, x: Tensor, weights: Tensor, experts: Tensor, packed: PackedExperts) -> Tensor:
        """See Kernels.experts_mlp; a backend with another grouped GEMM replaces ``grouped_linear`` alone."""
        rows = sort_by_expert(experts, len(packed.down), self.row_alignment)
        gate_up = self.grouped_linear(_rounded(x, packed)[rows.sources], packed.gate_up, rows)
        inner = self.silu_mul(limit_gates(gate_up, packed.limit))
        return combine(self.grouped_linear(_rounded(inner, packed), packed.down, rows), weights, rows)

    def sinkhorn(self, logits: Tensor, num_iterations: int, eps: float) -> Tensor:
        """See Kernels.sinkhorn."""
        return sinkhorn(logits, num_iterations, eps)

    def apply_token_bitmask(self, logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
        """See Kernels.apply_token_bitmask."""
        used, places = rows.unique(return_inverse=True)
        is_forbidden = _forbidden_tokens(bitmask[used], logits.shape[-1], logits.device)[places]
        if logits.device.type == "cpu" and logits.dtype == torch.float32:  # real masks are long runs: 10 times faster
            np.copyto(logits.numpy(), -np.inf, where=is_forbidden.numpy())
        else:
            logits.masked_fill_(is_forbidden, -torch.inf)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
        """See Kernels.sample; kernels.sampling has the formulas."""
        return sample(logits, batch)

    def _plan_for(self, batch: AttentionBatch, layout: Layout) -> AttentionPlan:
        if self._plan is None or self._plan[0] is not batch or self._plan[1] != layout:
            self._plan = batch, layout, plan_attention(batch, layout)
        return self._plan[2]


def _rounded(x: Tensor, packed: PackedExperts) -> Tensor:
    return round_rows(x) if packed.is_fp8 else x


def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this CPU's oneDNN takes prepacked weights of ``dtype`` and agrees with torch's own linear."""
    if dtype not in (torch.float32, torch.bfloat16) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.linspace(-1, 1, 24 * 16).view(24, 16).to(dtype)
    x = torch.linspace(1, -1, 3 * 16).view(3, 16).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # no such operator in this build, or the CPU lacks the instructions
        return False
    return torch.allclose(got.float(), functional.linear(x.float(), weight.float()), rtol=2e-2, atol=1e-2)


def plan_attention(batch: AttentionBatch, layout: Layout) -> AttentionPlan:
    """Decide what a step gathers from the cache; reads the block table, which on a CPU costs nothing."""
    can_share = layout.window is None and batch.block_table.device.type == "cpu"
    decodes = _decode_groups(batch, layout.block_size, can_share)
    prefills = range(batch.num_decodes, len(batch.query_lens))
    return AttentionPlan(
        tuple(_decode_group(batch, layout, members, num_shared) for members, num_shared in decodes),
        tuple(_prefill_part(batch, layout, index) for index in prefills),
    )


def _decode_groups(batch: AttentionBatch, block_size: int, can_share: bool) -> list[tuple[list[int], int]]:
    """Split the decodes by shared prefix, then by length: (members, shared blocks) with little padding in each."""
    if batch.num_decodes == 0:
        return []
    lens = batch.host_seq_lens[: batch.num_decodes]
    families: list[tuple[list[int], int]] = [(list(range(batch.num_decodes)), 0)]
    if can_share and batch.num_decodes >= MIN_SHARERS:
        families = _families(batch.block_table[: batch.num_decodes].numpy(), np.asarray(lens), block_size)
    buckets = []
    for members, num_shared in families:
        num_own = {m: -(-lens[m] // block_size) - num_shared for m in members}
        buckets += [(bucket, num_shared) for bucket in _buckets(num_own, block_size)]
    return buckets


def _families(table: np.ndarray, lens: np.ndarray, block_size: int) -> list[tuple[list[int], int]]:
    """Group rows of the block table by first block; each group with its number of common full blocks."""
    _, family_of = np.unique(table[:, 0], return_inverse=True)
    loners: list[int] = []
    families = []
    for family in range(int(family_of.max()) + 1):
        members = np.flatnonzero(family_of == family)
        limit = int((lens[members].min() - 1) // block_size)  # every member keeps at least one key of its own
        if len(members) < MIN_SHARERS or limit == 0:
            loners += members.tolist()
            continue
        head = table[members, :limit]
        is_common = (head == head[0]).all(axis=0)
        families.append((members.tolist(), limit if is_common.all() else int(is_common.argmin())))
    return [*families, (sorted(loners), 0)] if loners else families


def _buckets(num_own: dict[int, int], block_size: int) -> list[list[int]]:
    """Cut members, shortest first, where padding would double the work or the gather grow too large."""
    buckets: list[list[int]] = []
    shortest = 0
    for member in sorted(num_own, key=lambda m: (num_own[m], m)):
        blocks = num_own[member]
        is_full = bool(buckets) and (len(buckets[-1]) + 1) * blocks * block_size > MAX_GATHER_TOKENS
        if not buckets or is_full or blocks > 2 * shortest + 4:
            buckets.append([])
            shortest = blocks
        buckets[-1].append(member)
    return [sorted(bucket) for bucket in buckets]


def _decode_group(batch: AttentionBatch, layout: Layout, members: list[int], num_shared: int) -> DecodeGroup:
    block_size, window = layout.block_size, layout.window
    device = batch.block_table.device
    last_block = max(-(-batch.host_seq_lens[m] // block_size) for m in members)
    index = torch.tensor(members, device=device)
    table = batch.block_table.index_select(0, index)
    ends = batch.seq_lens.index_select(0, index)[:, None] - num_shared * block_size
    keys = torch.arange((last_block - num_shared) * block_size, device=device)[None]
    is_hidden = keys >= ends
    if window is not None:
        is_hidden |= keys < ends - window
    return DecodeGroup(
        members=index,
        shared_blocks=table[0, :num_shared],
        own_blocks=table[:, num_shared:last_block].contiguous(),
        own_mask=_additive_mask(is_hidden, layout.dtype)[:, None, None],
    )


def _prefill_part(batch: AttentionBatch, layout: Layout, index: int) -> PrefillPart:
    window = layout.window
    num_rows, num_keys = batch.query_lens[index], batch.host_seq_lens[index]
    start = sum(batch.query_lens[:index])
    device = batch.block_table.device
    mask = None
    if num_rows != num_keys or (window is not None and window < num_keys):
        positions = torch.arange(num_keys - num_rows, num_keys, device=device)[:, None]
        keys = torch.arange(num_keys, device=device)[None]
        is_hidden = keys > positions
        if window is not None:
            is_hidden |= keys <= positions - window
        mask = _additive_mask(is_hidden, layout.dtype)
    blocks = batch.block_table[index, : -(-num_keys // layout.block_size)]
    return PrefillPart(slice(start, start + num_rows), blocks, num_keys, mask)


def _additive_mask(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device).masked_fill_(is_hidden, -torch.inf)


def _gather(cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Copy whole blocks out of the cache: keys and values [tokens, G, D] each."""
    index = blocks.flatten()
    keys, values = (side.flatten(1).index_select(0, index).view(-1, *cache.shape[3:]) for side in cache)
    return keys, values


def _attend_decodes(q: Tensor, cache: Tensor, group: DecodeGroup, scale: float, out: Tensor) -> None:
    num_seqs, (num_groups, head_dim) = len(group.members), cache.shape[3:]
    grouped_q = q.index_select(0, group.members).view(num_seqs, num_groups, -1, head_dim)
    keys, values = (
        x.view(num_seqs, -1, num_groups, head_dim).transpose(1, 2) for x in _gather(cache, group.own_blocks)
    )
    result, lse = attend(grouped_q, keys, values, group.own_mask, scale)
    if len(group.shared_blocks):
        keys, values = (x.transpose(0, 1)[None] for x in _gather(cache, group.shared_blocks))
        stacked_q = grouped_q.transpose(0, 1).reshape(1, num_groups, -1, head_dim)
        prefix, prefix_lse = attend(stacked_q, keys, values, None, scale)
        prefix = prefix.view(num_groups, num_seqs, -1, head_dim).transpose(0, 1)
        prefix_lse = prefix_lse.view(num_groups, num_seqs, -1).transpose(0, 1)
        share = torch.sigmoid(prefix_lse - lse)[..., None]  # exp(prefix_lse) / (exp(prefix_lse) + exp(lse))
        result = torch.lerp(result.float(), prefix.float(), share)
    out.index_copy_(0, group.members, result.reshape(num_seqs, -1, head_dim).to(out.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [A, G, R, D] over k, v [A, G, T, D]: (out like q, fp32 log-sum-exp of scores [A, G, R]).

    ``mask`` [A, 1, 1, T] in q's dtype is added to the scores. Sums in fp32.
    """
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)).mul_(scale)
    if mask is not None:
        scores += mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.matmul(torch.exp(scores - lse[..., None]), v.float()).to(q.dtype), lse


def _attend_prefill(q: Tensor, cache: Tensor, part: PrefillPart, scale: float, out: Tensor) -> None:
    num_heads, num_groups = q.shape[1], cache.shape[3]
    # Repeating keys costs little beside the scores of many rows, and every torch attention kernel takes it.
    keys, values = (
        x[: part.num_keys].repeat_interleave(num_heads // num_groups, dim=1).transpose(0, 1)[None]
        for x in _gather(cache, part.blocks)
    )
    result = functional.scaled_dot_product_attention(
        q[part.rows].transpose(0, 1)[None],
        keys,
        values,
        attn_mask=part.mask,
        is_causal=part.mask is None,
        scale=scale,
    )
    out[part.rows] = result[0].transpose(0, 1)


def _forbidden_tokens(bitmask: Tensor, vocab_size: int, device: torch.device) -> Tensor:
    """Expand ``bitmask`` int32 [L, W] to bool [L, V], true where the bit is 0."""
    if bitmask.device.type == "cpu":  # measured: half the time of shifts in torch
        bits = np.unpackbits(~bitmask.numpy().view(np.uint8), axis=1, bitorder="little", count=vocab_size)
        return torch.from_numpy(bits).view(torch.bool).to(device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits_set = (bitmask.to(device)[..., None] >> shifts) & 1
    return (bits_set == 0).flatten(1)[:, :vocab_size]
