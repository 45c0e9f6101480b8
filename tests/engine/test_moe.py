"""The sparse feed-forward part: what parity with transformers on random weights in fp32 cannot show."""

import torch

from engine.batch import Rows
from engine.models.moe import SparseMlp
from engine.models.spec import ModelSpec
from engine.shards import Part
from kernels.reference import ReferenceKernels
from tests.tiny_models import tiny_config, tiny_weights


class Weights:
    """A WeightSource of tensors made by the test, in bfloat16 unless asked otherwise."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part | None = None) -> torch.Tensor:
        """See WeightSource.get."""
        return self._tensors[name].to(dtype or torch.bfloat16)

    def leave(self, prefix: str) -> None:
        """See WeightSource.leave."""


def test_a_bias_finer_than_the_models_dtype_still_decides_between_experts() -> None:
    config = tiny_config("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=1)
    weights, prefix = tiny_weights(config), "model.layers.1.mlp."
    weights[prefix + "gate.weight"].zero_()
    bias = weights[prefix + "gate.e_score_correction_bias"].fill_(5.0)
    bias[6] = 5.001  # rounds to 5.0 in bfloat16
    spec = ModelSpec.from_config(config)
    hidden, rows = torch.ones(2, 64, dtype=torch.bfloat16), Rows(torch.arange(2), 2)
    got = SparseMlp(spec, prefix, Weights(weights), ReferenceKernels(dtype=torch.bfloat16))(hidden, rows)
    for expert in (0, 7):  # what is not picked does not matter
        for name in ("gate", "up", "down"):
            weights[f"{prefix}experts.{expert}.{name}_proj.weight"].zero_()
    again = SparseMlp(spec, prefix, Weights(weights), ReferenceKernels(dtype=torch.bfloat16))(hidden, rows)
    assert torch.equal(got, again)
    weights[f"{prefix}experts.6.down_proj.weight"].zero_()
    without = SparseMlp(spec, prefix, Weights(weights), ReferenceKernels(dtype=torch.bfloat16))(hidden, rows)
    assert not torch.equal(got, without)
