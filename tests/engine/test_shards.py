"""Parts of weights: together they are the whole, and a rank reads no more than its own."""

from pathlib import Path

import pytest
import torch

from engine.dist import Group, Ranks
from engine.models.decoder import Decoder
from engine.models.spec import ModelSpec
from engine.shards import HEAD, Part, ShardedWeights, head_part, shard_spec
from engine.topology import Topology
from engine.weights import CheckpointWeights, SafetensorsFiles, cut
from kernels.reference import ReferenceKernels
from tests.tiny_models import tiny_config, tiny_weights, write_tiny_model

CPU = torch.device("cpu")
SPLIT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


class Weights:
    """A WeightSource in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str, dtype: torch.dtype | None = None, part: Part | None = None) -> torch.Tensor:
        """See WeightSource.get."""
        return cut(self._tensors[name], part)

    def leave(self, prefix: str) -> None:
        """See WeightSource.leave."""


class RecordingFiles(SafetensorsFiles):
    """Notes how many values are read of which tensor."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.num_read: dict[str, int] = {}

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """See TensorFile.read."""
        tensor = super().read(name, part)
        self.num_read[name] = tensor.numel()
        return tensor


def make_group(index: int, size: int = 2) -> Group:
    """A group whose other ranks are never spoken to."""
    group = Group()
    group.index, group.size = index, size
    return group


@pytest.mark.parametrize("count", [1, 2])
def test_the_parts_of_all_ranks_are_the_whole(count: int) -> None:
    config = tiny_config("llama", attention_bias=True, mlp_bias=True)
    spec, tensors = ModelSpec.from_config(config), tiny_weights(config)
    ranks = [ShardedWeights(Weights(tensors), spec, make_group(index, count)) for index in range(count)]
    for name, whole in tensors.items():
        parts = [rank.get(name) for rank in ranks]
        *_, module, kind = name.split(".")
        if module == "lm_head" or SPLIT.get(module) == 0:
            assert torch.equal(torch.cat(parts), whole), name
        elif module in SPLIT and kind == "weight":
            assert torch.equal(torch.cat(parts, dim=1), whole), name
        elif module in SPLIT:
            assert torch.equal(torch.stack(parts).sum(dim=0), whole), "a bias of a sum counts once"
        else:
            assert all(torch.equal(part, whole) for part in parts), name
    shard = shard_spec(spec, count)
    assert (shard.num_heads, shard.num_kv_heads, shard.intermediate_size) == (4 // count, 2 // count, 96 // count)


def test_a_head_that_does_not_divide_is_whole_on_every_rank() -> None:
    assert head_part(321, make_group(1)) == slice(321)
    assert head_part(320, make_group(1)) == slice(160, 320)


def test_a_tensor_parallel_rank_reads_its_parts_alone(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama", num_shards=2)
    spec = ModelSpec.from_config(tiny_config("llama"))
    files = RecordingFiles(tmp_path)
    source = CheckpointWeights(files, spec, CPU, torch.float32)
    Decoder(spec, source, ReferenceKernels(), Ranks(Topology(tensor=2), 1, tensor=make_group(1)))
    source.check_all_used()
    sizes = {name: tensor.numel() for name, tensor in tiny_weights(tiny_config("llama")).items()}
    for name, num_read in files.num_read.items():
        is_split = name == HEAD or any(f".{module}." in name for module in SPLIT)
        assert num_read == sizes[name] // (2 if is_split else 1), name


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_reads_no_expert_of_another(tmp_path: Path, index: int) -> None:
    write_tiny_model(tmp_path, "deepseek_v3")
    spec = ModelSpec.from_config(tiny_config("deepseek_v3"))
    files = RecordingFiles(tmp_path)
    source = CheckpointWeights(files, spec, CPU, torch.float32)
    Decoder(spec, source, ReferenceKernels(), Ranks(Topology(data=2, expert=2), index, experts=make_group(index)))
    source.check_all_used()
    experts = {name.split(".experts.")[1].split(".")[0] for name in files.num_read if ".experts." in name}
    assert experts == {str(expert) for expert in range(4 * index, 4 * index + 4)}
