"""Speeds of several GPUs are told as multiples of one GPU's."""

from ops.bench.ranks import POINTS, describe_exchange, speed_ratios


def test_a_ratio_needs_the_same_shape_and_work_on_one_gpu() -> None:
    def entry(name: str, shape: str, **rows_per_s: float) -> dict[str, object]:
        results = {work: {"rows_per_s": speed, "output_tokens_per_s": speed / 2} for work, speed in rows_per_s.items()}
        return {"name": name, "shape": shape, "results": results}

    entries = [
        entry("one", "a", extract=100, free=10),
        entry("pair", "a", extract=180, free=15),
        entry("pair", "b", extract=180),
    ]
    assert speed_ratios(entries) == {"a extract, pair": 1.8, "a free, pair": 1.5}


def test_every_pair_has_its_one() -> None:
    alone = {point.shape for point in POINTS if point.name == "one"}
    assert {point.shape for point in POINTS} == alone
    assert {point.num_ranks for point in POINTS if point.name != "one"} == {2}


def test_a_measurement_that_was_cut_short_says_so() -> None:
    times = [{"rows": 8, "form": "deep_ep", "us": 40.0, "link_us": 4.0, "share_of_link": 0.1}]
    found = {"num_ranks": 2, "hidden_size": 64, "times": times, "error": "stopped after 60 s"}
    assert [line.split(": ")[1] for line in describe_exchange(found)] == [
        "    8 rows deep_ep          40.0 us, 10% of the link",
        "stopped after 60 s",
    ]
