"""Where kernels that are compiled on this machine are kept for later starts. Knows no kernel."""

import os
from pathlib import Path


def compiled_directory() -> Path:
    """The user's; it may not be there yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nightmill"
