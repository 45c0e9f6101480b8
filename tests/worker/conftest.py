from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.lab import Lab


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    labs: list[Lab] = []

    def make(**worker: Any) -> Lab:
        labs.append(Lab(tmp_path, **worker))
        return labs[-1]

    yield make
    for lab in labs:
        lab.close()


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    return make_lab()
