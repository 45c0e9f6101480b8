"""Which ranks talk to each other, and which shapes are refused with the numbers."""

import pytest

from engine.models.spec import ModelSpec
from engine.topology import Topology
from schemas.errors import SettingsError
from schemas.settings import EngineSettings
from tests.tiny_models import tiny_config


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    topology = Topology(data=4, context=2, expert=4)
    assert topology.num_ranks == 8
    assert topology.replica_groups() == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert topology.expert_groups() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert topology.lockstep_groups() == [(0, 2), (4, 6)]
    assert topology.context_groups() == topology.replica_groups()
    assert topology.tensor_groups() == [(rank,) for rank in range(8)]


def test_tensor_and_context_parts_of_a_replica_cross() -> None:
    topology = Topology(data=2, context=2, tensor=2)
    assert topology.replica_groups() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert topology.tensor_groups() == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert topology.context_groups() == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(topology.leaders) == [0, 4]
    assert topology.lockstep_groups() == [(0,), (4,)]


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"expert_parallel": 2}, "expert_parallel 2 does not divide the 1 ranks"),
        ({"data_parallel": 3, "context_parallel": 2, "expert_parallel": 3}, "does not divide the 6 ranks"),
        ({"data_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2}, "tensor_parallel 2"),
    ],
)
def test_degrees_that_do_not_fit_each_other_are_refused(settings: dict[str, int], numbers: str) -> None:
    with pytest.raises(SettingsError, match=numbers):
        Topology.of(EngineSettings(**settings))


@pytest.mark.parametrize(
    ("family", "topology", "numbers"),
    [
        ("llama", Topology(tensor=4), "does not divide 2 key-value heads"),
        ("smollm2", Topology(tensor=2), "does not divide 3 attention heads and 1 key-value heads"),
        ("qwen3_moe", Topology(tensor=2), "set engine.data_parallel and engine.expert_parallel"),
        ("llama", Topology(data=2, expert=2), "the model has 0 experts"),
        ("deepseek_v3", Topology(data=16, expert=16), "the model has 8 experts"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(family: str, topology: Topology, numbers: str) -> None:
    topology.check()
    with pytest.raises(SettingsError, match=numbers):
        topology.check_model(ModelSpec.from_config(tiny_config(family)))
