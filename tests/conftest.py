"""What every test stands on: a clean environment, bounded threads, slow tests last. Knows no package of ours."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

# Before anything imports torch or tokenizers; child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other on a busy machine take four times as long
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # these sources
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

# The same examples in every run, and no limit on their time: one run decides whether a change is good, on a machine
# that may be busy. ``--hypothesis-profile explore`` looks for new ones.
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile("nightmill", deadline=None, derandomize=True)
hypothesis.settings.load_profile("nightmill")


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The directory that holds pyproject.toml."""
    return ROOT


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Every file of the repository that git knows and that exists."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real inputs that may lie beside the repository; tests that need them are skipped elsewhere."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data beside the repository")
    return path


@pytest.fixture(scope="session", autouse=True)
def _isolated_environment() -> Iterator[None]:
    """Hide the developer's own settings and put the default state directory under /tmp (socket paths must be short)."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("NIGHTMILL_")}
    state_home = os.environ.get("XDG_STATE_HOME")
    with tempfile.TemporaryDirectory(prefix="nm-") as directory:
        os.environ["XDG_STATE_HOME"] = directory
        yield
    os.environ.update(hidden)
    if state_home is None:
        os.environ.pop("XDG_STATE_HOME", None)
    else:
        os.environ["XDG_STATE_HOME"] = state_home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the fast tests first, so that a broken change fails early."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
