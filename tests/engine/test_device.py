"""How many CPU threads an engine takes. That a device which is not there is refused, test_loop shows."""

import os
from collections.abc import Iterator

import pytest
import torch

from engine.device import select_device
from schemas.settings import EngineSettings


@pytest.fixture(autouse=True)
def _keep_num_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("told", "setting", "num_ranks", "num_threads"),
    [("3", 0, 1, 3), ("3,2", 0, 2, 3), ("3", 2, 1, 2), ("", 0, 1, None), ("0", 0, 1, None), ("", 0, 10_000, 1)],
)
def test_threads_are_those_of_the_setting_then_of_openmp_then_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, told: str, setting: int, num_ranks: int, num_threads: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", told)
    select_device(EngineSettings(device="cpu", num_threads=setting), 0, num_ranks)
    assert torch.get_num_threads() == (num_threads or len(os.sched_getaffinity(0)))
