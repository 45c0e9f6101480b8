"""A broker of its own for each module that asks for one, empty for each test."""

from collections.abc import Iterator

import pytest
import redis

from jobs.broker import ensure_broker, stop_broker
from jobs.queue import connect
from schemas.settings import Settings


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    settings = Settings(state_dir=tmp_path_factory.mktemp("broker"))
    yield ensure_broker(settings)
    stop_broker(settings)


@pytest.fixture
def client(broker: str) -> Iterator[redis.Redis]:
    with connect(broker) as client:
        client.flushall()
        yield client
