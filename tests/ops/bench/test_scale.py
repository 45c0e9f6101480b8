"""What the scale bench measures by the GPUs there are, and what it makes of the speeds."""

from pathlib import Path

import pytest

from engine.models.spec import ModelSpec
from engine.topology import Topology
from ops.bench.scale import ScaleBench, default_counts, efficiency, scale_points
from ops.bench.workloads import SHAPES
from schemas.settings import EngineSettings

BENCH = ScaleBench(Path("questions"), None, 600)


@pytest.mark.parametrize(
    ("num_gpus", "counts"), [(1, (1,)), (2, (1, 2)), (3, (1, 2)), (4, (1, 2, 4)), (8, (1, 2, 4, 8))]
)
def test_counts_are_the_powers_of_two_that_there_are_gpus_for(num_gpus: int, counts: tuple[int, ...]) -> None:
    assert default_counts(num_gpus) == counts


@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_every_engine_of_the_bench_is_one_that_the_model_allows(most: int) -> None:
    points = scale_points(BENCH, default_counts(most))
    for point in points:
        topology = Topology.of(EngineSettings(**point.engine))
        topology.check_model(ModelSpec.from_config(SHAPES[point.shape]))
        assert topology.num_ranks == point.num_ranks <= most
    names = {point.name for point in points}
    assert names == {"uniform"} | ({"skewed", "skewed, experts move"} if most > 1 else set()) | (
        {"full depth"} if most == 8 else set()
    )


def test_efficiency_is_the_speed_of_a_rank_by_that_of_the_fewest() -> None:
    entries = [
        {"name": "uniform", "num_ranks": 4, "results": {"extract": {"rows_per_s": 360.0, "output_tokens_per_s": 1.0}}},
        {"name": "uniform", "num_ranks": 1, "results": {"extract": {"rows_per_s": 120.0, "output_tokens_per_s": 1.0}}},
        {"name": "uniform", "num_ranks": 2, "results": {"extract": {"rows_per_s": 200.0, "output_tokens_per_s": 1.0}}},
        {"name": "skewed", "num_ranks": 4, "results": {"extract": {"rows_per_s": 1.0, "output_tokens_per_s": 1.0}}},
    ]
    table = efficiency(entries)["extract"]
    assert {count: each["efficiency"] for count, each in table.items()} == {
        "1": 1.0,
        "2": pytest.approx(200 / 240),
        "4": 0.75,
    }
    assert table["4"]["efficiency_from_2"] == pytest.approx(0.9)
