"""Multi-head latent attention (arXiv:2405.04434) in plain torch: absorbed and expanded forms of the same attention.

Absorbed: the query goes down to the latents, all heads share one key, and the result goes up. Expanded: latents go up
to every head's keys and values. Shape legend as in kernels.api, C = R + P. Knows no blocks: latents come gathered.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class UpProjection:
    """From a latent to the heads' keys and values; two views of one weight."""

    both: Tensor  # [H * (D + Dv), R]: each head's keys before its values
    keys: Tensor  # [H, D, R]
    values: Tensor  # [H, Dv, R]


def split_up_projection(weight: Tensor, num_heads: int, key_size: int) -> UpProjection:
    """Split kv_b_proj's weight [H * (D + Dv), R] by heads."""
    by_head = weight.unflatten(0, (num_heads, -1))
    return UpProjection(weight, by_head[:, :key_size], by_head[:, key_size:])


def absorb(q: Tensor, q_rope: Tensor, up: UpProjection) -> Tensor:
    """Queries [N, H, D] and [N, H, P] against cached latents: [N, H, C]."""
    down = torch.bmm(q.transpose(0, 1), up.keys).transpose(0, 1)
    return torch.cat((down, q_rope), dim=-1)


def project_values(attended: Tensor, up: UpProjection) -> Tensor:
    """Attended latents [N, H, R] -> the heads' outputs [N, H, Dv]."""
    return torch.bmm(attended.transpose(0, 1), up.values.transpose(1, 2)).transpose(0, 1)


def attend_rows(
    q: Tensor, q_rope: Tensor, latents: Tensor, up: UpProjection, *, mask: Tensor | None, scale: float
) -> Tensor:
    """One sequence's last rows q [N, H, D], q_rope [N, H, P] over its latents [T, C]: [N, H, Dv].

    ``mask`` [N, T] is added to the scores; None: the rows are all T positions, causally.
    """
    attend = _attend_absorbed if is_absorbing_cheaper(len(q), up) else _attend_expanded
    return attend(q, q_rope, latents, up, mask=mask, scale=scale)


def is_absorbing_cheaper(num_rows: int, up: UpProjection) -> bool:
    """Compare the multiplications for one key: wider scores and sums for each row, or one projection for all rows."""
    (_, key_size, rank), value_size = up.keys.shape, up.values.shape[1]
    return num_rows * (2 * rank - key_size - value_size) < rank * (key_size + value_size)


def _attend_absorbed(
    q: Tensor, q_rope: Tensor, latents: Tensor, up: UpProjection, *, mask: Tensor | None, scale: float
) -> Tensor:
    keys = latents.expand(1, q.shape[1], -1, -1)
    values = keys[..., : up.keys.shape[2]]
    attended = _attend(absorb(q, q_rope, up), keys, values, mask, scale)
    return project_values(attended, up)


def _attend_expanded(
    q: Tensor, q_rope: Tensor, latents: Tensor, up: UpProjection, *, mask: Tensor | None, scale: float
) -> Tensor:
    latent, k_rope = latents.split((up.keys.shape[2], q_rope.shape[2]), dim=-1)
    keys = torch.cat((latent @ up.keys.mT, k_rope.expand(q.shape[1], -1, -1)), dim=-1)
    values = latent @ up.values.mT
    return _attend(torch.cat((q, q_rope), dim=-1), keys[None], values[None], mask, scale)


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [N, H, *] over keys [1, H, T, *] and values [1, H, T, *]: [N, H, *]."""
    heads_first = q.transpose(0, 1)[None]
    out = functional.scaled_dot_product_attention(
        heads_first, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0].transpose(0, 1)
