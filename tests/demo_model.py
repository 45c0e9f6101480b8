"""The demo model for tests: its files, or a skip that says how to install it."""

import pytest

from schemas.errors import ModelError
from schemas.model_files import ModelFiles, resolve_model


def demo_model() -> ModelFiles:
    """Find the package's files without importing it: its own dependencies are not installed."""
    try:
        return resolve_model("smollm2")
    except ModelError as error:
        pytest.skip(str(error))
