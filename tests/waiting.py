"""Wait for a condition with a deadline, as tests do instead of sleeping."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float) -> Any:
    """Wait until ``condition()`` is truthy and return it."""
    end_s = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {deadline_s} s in vain for: {what}"
        time.sleep(0.02)
    return value
