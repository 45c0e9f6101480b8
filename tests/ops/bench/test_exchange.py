"""What the exchange takes is measured on real processes, and a form that cannot be had is told."""

import pytest

from ops.bench.exchange import exchange_shape, measure_exchange
from ops.bench.workloads import SHAPES


def test_every_size_has_a_time_and_what_its_bytes_take_on_the_link() -> None:
    shape = exchange_shape(SHAPES["DeepSeek-V3-tiny"], 2)
    found = measure_exchange(2, shape, "cpu", rows=(8, 64))
    assert "error" not in found
    assert found["vote_us"] > 0
    assert found["forms"]["deep_ep"] == "it joins NVIDIA GPUs, not cpu"
    assert [(each["rows"], each["form"]) for each in found["times"]] == [(8, "collective"), (64, "collective")]
    num_bytes = 2 * 64 * 128 * 2  # there and back: the other rank's rows of 128 values
    assert found["times"][1]["link_us"] == pytest.approx(num_bytes / found["link_bytes_per_s"] * 1e6, abs=0.06)
