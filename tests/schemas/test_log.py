"""Logging: structured events on stderr."""

import json
from collections.abc import Iterator

import pytest
import structlog

from schemas.log import configure_logging


@pytest.fixture(autouse=True)
def _restore_structlog() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_events_off_a_terminal_are_json_lines_with_bound_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("INFO")
    structlog.get_logger().bind(job_id="j-1").info("chunk_committed", chunk=3)
    captured = capsys.readouterr()
    event = json.loads(captured.err)
    assert captured.out == ""
    assert (event["event"], event["job_id"], event["chunk"], event["level"]) == ("chunk_committed", "j-1", 3, "info")
    assert event["timestamp"].endswith("Z")


def test_events_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "console")
    structlog.get_logger().info("not_shown")
    structlog.get_logger().warning("shown")
    assert "not_shown" not in (text := capsys.readouterr().err)
    assert "shown" in text
