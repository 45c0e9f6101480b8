"""The layer parts of dense decoders: Llama, SmolLM2, Mistral, Qwen2 and Qwen3, told apart by their ModelSpec alone.

Shape legend: N rows, H query heads, G key-value heads, D head size. Knows no requests and no files.
"""

from torch import Tensor

from engine.batch import Rows
from engine.dist import Group
from engine.models import WeightSource
from engine.models.layers import load_linear, pack_fused
from engine.models.spec import ModelSpec
from kernels.api import AttentionBatch, HeadNorms, Kernels


class GroupedAttention:
    """Implements decoder.Attention: H query heads over G cached key and value heads."""

    def __init__(
        self, spec: ModelSpec, index: int, source: WeightSource, kernels: Kernels, context: Group | None = None
    ) -> None:
        prefix = f"model.layers.{index}.self_attn."
        qkv = [load_linear(source, prefix + name, has_bias=spec.qkv_bias) for name in ("q_proj", "k_proj", "v_proj")]
        self._kernels, self._context = kernels, context or Group()
        self._qkv = pack_fused(kernels, qkv)
        self._norms = None
        if spec.qk_norm:
            q_weight, k_weight = (source.get(f"{prefix}{side}_norm.weight") for side in "qk")
            self._norms = HeadNorms(q_weight, k_weight, spec.rms_norm_eps)
        self.output = pack_fused(kernels, [load_linear(source, prefix + "o_proj", has_bias=spec.output_bias)])
        self._window = spec.layer_windows[index]
        self._num_kv_heads, self._head_dim = spec.num_kv_heads, spec.head_dim
        self._sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]

    def cache_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """See Attention.cache_shape: keys, then values."""
        return (2, num_blocks, block_size, self._num_kv_heads, self._head_dim)

    def __call__(self, hidden: Tensor, cos_sin: tuple[Tensor, Tensor], batch: AttentionBatch, cache: Tensor) -> Tensor:
        """See Attention.__call__: [N, H * D]."""
        kernels = self._kernels
        parts = kernels.linear(hidden, self._qkv).split(self._sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        if self._context.size == 1:
            q = kernels.rotary_write_kv(q, k, v, cos_sin, cache=cache, slots=batch.slots, norms=self._norms)
        else:
            q, k = kernels.rotary(q, k, *cos_sin, self._norms)
            k, v = (self._context.gather(side, len(batch.slots)) for side in (k, v))
            kernels.write_kv(cache, batch.slots, k, v)
        return kernels.attention(q, cache, batch, scale=self._head_dim**-0.5, window=self._window).flatten(1)


class GatedMlp:
    """Implements decoder.FeedForward: down(silu(gate x) * up x), gate and up fused in one projection."""

    def __init__(self, spec: ModelSpec, prefix: str, source: WeightSource, kernels: Kernels) -> None:
        gate, up, down = (
            load_linear(source, prefix + name, has_bias=spec.mlp_bias) for name in ("gate_proj", "up_proj", "down_proj")
        )
        self._kernels = kernels
        self._gate_up = pack_fused(kernels, [gate, up])
        self._down = pack_fused(kernels, [down])

    def __call__(self, hidden: Tensor, _: Rows) -> Tensor:
        """See FeedForward.__call__."""
        kernels = self._kernels
        return kernels.linear(kernels.silu_mul(kernels.linear(hidden, self._gate_up)), self._down)
