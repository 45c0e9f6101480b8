"""Multi-head latent attention of DeepSeek V2, V3 (arXiv:2405.04434): all heads share cached latents and rotated keys.

Shape legend: N rows, H heads, D size of a head's key without its rotated part, Dv of its value, R of the latent, P of
the rotated part. Knows no requests and no files; whether rows absorb the up-projection is the kernels' choice.
"""

from torch import Tensor

from engine.dist import Group
from engine.models import WeightSource
from engine.models.layers import Linear, load_linear, pack_fused, softmax_scale
from engine.models.spec import ModelSpec
from kernels.api import AttentionBatch, Kernels

LATENT_NORM_EPS = 1e-6
"""Of the norms on latents, whatever the model's rms_norm_eps."""


class LatentAttention:
    """Implements decoder.Attention; both projections down to latents are one."""

    def __init__(
        self, spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels, context: Group | None = None
    ) -> None:
        latent = spec.latent
        assert latent is not None, "latent attention needs its sizes"
        prefix = f"model.layers.{index}.self_attn."
        self._kernels, self._latent, self._context = kernels, latent, context or Group()
        query_size = latent.key_size + latent.rope_size
        self._q_shape = (spec.num_heads, query_size)
        self._scale = softmax_scale(spec.rope, query_size)

        def load(name: str, *, plain_rows: int = 0, has_bias: bool = False) -> Linear:
            weight, bias = load_linear(source, prefix + name, has_bias=has_bias)
            if plain_rows and latent.is_interleaved:
                weight = halves_first(weight, plain_rows, latent.rope_size)
                bias = bias if bias is None else halves_first(bias, plain_rows, latent.rope_size)
            return Linear(weight, bias)

        to_latent = load("kv_a_proj_with_mqa", plain_rows=latent.kv_rank, has_bias=spec.output_bias)
        if latent.q_rank is None:
            to_query = load("q_proj", plain_rows=latent.key_size)
            self._q_norm = self._q_up = None
        else:
            to_query = load("q_a_proj", has_bias=spec.output_bias)
            self._q_norm = source.get(prefix + "q_a_layernorm.weight")
            self._q_up = pack_fused(kernels, [load("q_b_proj", plain_rows=latent.key_size)])
        self._down = pack_fused(kernels, [to_query, to_latent])
        self._sizes = [len(to_query.weight), latent.kv_rank, latent.rope_size]
        self._kv_norm = source.get(prefix + "kv_a_layernorm.weight")
        kv_up = source.get(prefix + "kv_b_proj.weight")
        self._kv_up = kernels.pack_up_projection(kv_up, spec.num_heads, latent.key_size)
        self.output = pack_fused(kernels, [load("o_proj", has_bias=spec.output_bias)])

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """See Attention.cache_shape: latent, then rotated key, as if of a single head."""
        return (num_blocks, block_size, 1, self._latent.kv_rank + self._latent.rope_size)

    def __call__(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], batch: AttentionBatch, cache: Tensor) -> Tensor:
        """See Attention.__call__: [N, H * Dv]."""
        kernels, sizes = self._kernels, (self._latent.key_size, self._latent.rope_size)
        query, latent, k_rope = kernels.linear(hidden, self._down).split(self._sizes, dim=-1)
        if self._q_norm is not None:
            query = kernels.linear(kernels.rms_norm(query, self._q_norm, LATENT_NORM_EPS), self._q_up)
        q, q_rope = query.unflatten(-1, self._q_shape).split(sizes, dim=-1)
        q_rope, k_rope = kernels.rotary(q_rope, k_rope[:, None], *cos_sin)
        latent = kernels.rms_norm(latent, self._kv_norm, LATENT_NORM_EPS)
        latent, k_rope = (self._context.gather(part, len(batch.slots)) for part in (latent, k_rope[:, 0]))
        kernels.write_latent(cache, batch.slots, latent, k_rope)
        return kernels.latent_attention(q, q_rope, cache, batch, self._kv_up, scale=self._scale).flatten(1)


def halves_first(rows: Tensor, plain: int, rope: int) -> Tensor:
    """Reorder each head's rotated rows from neighbouring pairs to halves, which ``Kernels.rotary`` rotates.

    ``rows`` is [H * (plain + rope), ...]. Queries and keys change alike, so that their products stay.
    """
    by_head = rows.unflatten(0, (-1, plain + rope)).clone()
    rotated = by_head[:, plain:]
    rotated[:, : rope // 2], rotated[:, rope // 2 :] = rotated[:, 0::2].clone(), rotated[:, 1::2].clone()
    return by_head.flatten(0, 1)
