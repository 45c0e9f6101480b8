"""Predictions equal a hand calculation on small shapes, and are compared with what several GPUs measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.models.spec import ModelSpec
from engine.topology import Topology
from ops import plan
from ops.bench.roofline import Costs, Rates, RowWork
from ops.bench.workloads import SHAPES
from ops.plan import Link, Work, bound_seconds, compare, memory_of, rank_costs, topologies, travel_seconds
from tests.ops.bench.test_roofline import CONFIG

RATES = Rates(flops_per_s=1e6, bytes_per_s=1e6)
TINY = SHAPES["DeepSeek-V3-tiny"]
PREFILLS = Work((RowWork(100, 40, 5),) * 8, has_decodes=False)
DECODES = Work((RowWork(10, 9, 4),) * 8, has_decodes=True)


def test_two_replicas_hold_all_weights_and_half_the_experts() -> None:
    costs = Costs.of(TINY)
    whole = memory_of(TINY, costs, Topology(data=2))
    shared = memory_of(TINY, costs, Topology(data=2, expert=2))
    experts = 2 * 16 * costs.expert_parameters  # bytes of bfloat16
    embeddings = 2 * 2 * 49152 * 128
    assert whole.weight_bytes == 2 * costs.body_parameters + experts + embeddings
    assert shared.weight_bytes == whole.weight_bytes - experts / 2
    assert whole.cache_bytes_per_token == 3 * 2 * (64 + 16)  # latent and rotated key of each layer
    in_fp8 = memory_of(TINY, replace(costs, parameter_bytes=1), Topology())
    assert in_fp8.weight_bytes == costs.body_parameters + experts / 2 + embeddings


def test_a_shard_holds_half_of_all_but_the_embedding() -> None:
    costs = Costs.of(CONFIG)
    shard = memory_of(CONFIG, costs, Topology(tensor=2))
    assert shard.weight_bytes == costs.body_parameters + 2 * costs.head_parameters + costs.head_parameters
    assert shard.cache_bytes_per_token == costs.cache_bytes / 2


def test_a_cache_has_what_weights_leave() -> None:
    memory = plan.Memory(weight_bytes=2**30, cache_bytes_per_token=2**20)
    assert memory.cache_tokens(4.0) == int(0.9 * 2 * 1024)
    assert memory.cache_tokens(2.0) == 0


def test_prefills_are_divided_by_all_ranks() -> None:
    costs = Costs.of(TINY)
    alone = bound_seconds(costs, RATES, Topology(), PREFILLS)
    for topology in (Topology(data=2), Topology(data=2, expert=2), Topology(context=2), Topology(tensor=2)):
        assert bound_seconds(costs, RATES, topology, PREFILLS) == pytest.approx(alone / 2)


def test_a_rank_reads_its_experts_for_the_rows_of_all() -> None:
    costs = Costs.of(TINY)
    rank = rank_costs(costs, Topology(data=2, expert=2))
    num_read = 16 * (1 - (1 - 4 / 16) ** 10)  # of 5 rows on each of two ranks
    assert rank.read_parameters(5) == pytest.approx(costs.body_parameters + num_read * costs.expert_parameters / 2)


def test_decodes_take_the_bytes_of_a_replicas_rows() -> None:
    costs, rates = Costs.of(CONFIG), Rates(1e12, 1e6)
    weights = 2 * (costs.body_parameters + costs.head_parameters)
    steps = [weights + 4 * costs.cache_bytes * (10 + step) for step in (1, 2, 3)]  # 4 of 8 rows
    prefill = bound_seconds(costs, rates, Topology(data=2), replace(DECODES, has_decodes=False))
    assert bound_seconds(costs, rates, Topology(data=2), DECODES) == pytest.approx(prefill + sum(steps) / 1e6)


@pytest.mark.parametrize(
    ("topology", "num_calls", "num_bytes"),
    [
        (Topology(), 0, 0),
        (Topology(data=2), 0, 0),
        (Topology(context=2, expert=2), (3 + 2 * 2) * 480 / 4096, 480 * 3 * 160 / 2 + 2 * 2 * 240 * 256),
        (Topology(data=2, expert=2), 2 * 2 * 240 / 4096, 2 * 2 * 240 * 256),  # 2 sparse layers, 4 x 60 rows there, back
        (Topology(tensor=2), 2 * 3 * 480 / 4096, 2 * 3 * 480 * 256),  # 3 layers, half of each sum twice
        (Topology(context=2), 3 * 480 / 4096, 480 * 3 * 160 / 2),  # latents of 3 layers
    ],
)
def test_what_travels_is_a_plain_count(topology: Topology, num_calls: float, num_bytes: float) -> None:
    link = Link(bytes_per_s=1e6, call_s=1e-3, vote_s=2e-3)
    votes = 2e-3 * 240 / 4096 if topology.shares_experts else 0.0
    assert travel_seconds(TINY, topology, PREFILLS, link) == pytest.approx(votes + num_calls * 1e-3 + num_bytes / 1e6)


def test_topologies_are_those_that_the_model_allows() -> None:
    sparse = set(topologies(ModelSpec.from_config(TINY), 2))
    assert sparse == {
        Topology(data=2),
        Topology(data=2, expert=2),
        Topology(context=2),
        Topology(context=2, expert=2),
    }
    assert Topology(tensor=2) in set(topologies(ModelSpec.from_config(CONFIG), 2))


def test_a_prediction_is_compared_where_one_gpu_did_the_same_in_the_same_run(tmp_path: Path) -> None:
    def point(num_ranks: int, seconds: float, name: str = "uniform") -> dict[str, object]:
        engine = {"data_parallel": num_ranks} if num_ranks > 1 else {}
        result = {"seconds": seconds, "output_tokens_per_s": 1.0}
        facts = {"name": name, "shape": "Qwen3-0.6B", "quantization": "none", "engine": engine}
        return facts | {"results": {"decode 64": result}}

    points = [point(1, 2.0), point(2, 2.5), point(2, 9.0, "skewed"), {**point(4, 1.0), "shape": "Qwen3-8B"}]
    (tmp_path / "scale.json").write_text(json.dumps({"points": points}))
    measured = plan.read_measured(tmp_path)
    assert [(each.topology.data, len(each.work.rows)) for each in measured] == [(1, 64), (2, 128), (4, 256)]
    (row,) = compare(measured, Link())
    assert (row["topology"], row["measured_s"], row["predicted_s"]) == ("data 2", 2.5, 2.0)  # each replica its rows
    assert row["error"] == -0.2


def test_the_link_is_what_was_measured(tmp_path: Path) -> None:
    assert plan.find_link(tmp_path) == Link()
    times = [{"rows": 64, "form": "collective", "us": 80.0}, {"rows": 8, "form": "collective", "us": 60.0}]
    (tmp_path / "ranks.json").write_text(
        json.dumps({"exchange": [{"link_bytes_per_s": 3e11, "vote_us": 200.0, "times": times}]})
    )
    assert plan.find_link(tmp_path) == Link(3e11, 30e-6, 200e-6)


def test_the_command_names_a_line_for_each_topology_and_what_speeds_rest_on() -> None:
    done = CliRunner().invoke(plan.main, ["--model", "DeepSeek-V2-Lite", "--gpus", "2"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert {line.split("  ")[0] for line in lines[1:5]} == {
        "data 2",
        "context 2",
        "data 2 x experts 2",
        "experts 2 x context 2",
    }
    assert "one GPU reaches" in lines[-1]


def test_a_model_that_is_not_there_is_named() -> None:
    done = CliRunner().invoke(plan.main, ["--model", "nowhere"])
    assert "nowhere holds no config.json" in str(done.exception)
