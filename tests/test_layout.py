"""The shape of the code that no linter knows: what may be imported, opened, built and how long a file may be.

import-linter guards the layers themselves; `make test` runs it as a stage of its own.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("schemas", "kernels", "engine", "jobs", "worker", "ops")
MAX_LINES = 450

# Module -> why it touches files although only jobs.store may.
MAY_OPEN_FILES = {
    "jobs/store.py": "it is the store",
    "jobs/broker.py": "the embedded server's own lock, log and configuration",
    "jobs/local_worker.py": "the log of the worker it starts",
}
# Module -> why it builds Settings although only entry points may.
MAY_BUILD_SETTINGS = {
    "jobs/cli.py": "entry point of every verb",
    "jobs/broker.py": "entry point: python -m jobs.broker",
    "worker/celery.py": "entry point: celery -A worker",
    "engine/rank.py": "entry point: python -m engine.rank",
    "schemas/settings.py": "defines them",
}
# Tests of a whole path rather than of one module, by directory.
WHOLE_PATH_TESTS = {
    "engine": {"test_parity"},
    "worker": {"test_delivery", "test_security", "test_shutdown", "test_worker"},
}

FILE_CALLS = {"read_text", "write_text", "read_bytes", "write_bytes", "fdopen", "unlink", "link", "rename", "mkdir"}


def sources(*packages: str) -> Iterator[Path]:
    for package in packages:
        yield from sorted(Path(package).rglob("*.py"))


@pytest.fixture(autouse=True)
def _in_repo_root(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo_root)


def test_kernels_init_is_nothing_but_a_docstring() -> None:
    tree = ast.parse(Path("kernels/__init__.py").read_text())
    assert [type(node) for node in tree.body] == [ast.Expr]
    assert ast.get_docstring(tree)


def test_worker_init_is_empty() -> None:
    assert Path("worker/__init__.py").read_text() == ""


def test_version_stays_below_what_transformers_would_take_for_its_kernels_package() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert project["version"].startswith("0.1.")


def test_transformers_model_code_loads_beside_our_kernels_package() -> None:
    code = "from transformers import LlamaForCausalLM; import kernels; assert not hasattr(kernels, '__version__')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("package", ["schemas", "jobs", "worker"])
def test_package_imports_without_torch(package: str) -> None:
    modules = [
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in sources(package)
        if path.name != "__main__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'xgrammar', 'llguidance'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_submit_help_answers_without_torch() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "jobs.submit", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "--schema" in done.stdout
    assert not {"torch", "transformers", "xgrammar", "llguidance"} & imported


def test_only_the_store_opens_files() -> None:
    offenders = [
        f"{path}:{line}: {call}"
        for path in sources("jobs", "worker")
        if path.as_posix() not in MAY_OPEN_FILES
        for line, call in file_calls(ast.parse(path.read_text()))
    ]
    assert offenders == []


def file_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each call that opens, writes or removes a file by path; ``Job.open`` and its like are not."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id == "open":
            yield node.lineno, "open"
        elif isinstance(function, ast.Attribute):
            of_a_class = isinstance(function.value, ast.Name) and (
                function.value.id.istitle() or function.value.id == "cls"
            )
            if function.attr in FILE_CALLS or (function.attr == "open" and not of_a_class):
                yield node.lineno, function.attr


def test_file_calls_sees_what_it_looks_for() -> None:
    code = "open('x')\nPath('x').open()\np.read_text()\nJob.open(store, 'x')\nos.link(a, b)\nopen_store('x')"
    assert [line for line, _ in file_calls(ast.parse(code))] == [1, 2, 3, 5]


def test_only_entry_points_build_settings() -> None:
    offenders = [
        f"{path}:{node.lineno}"
        for path in sources("schemas", "kernels", "engine", "jobs", "worker")
        if path.as_posix() not in MAY_BUILD_SETTINGS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Settings", "Settings.load")
    ]
    assert offenders == []


def test_files_fit_a_head() -> None:
    lengths = {path.as_posix(): path.read_text().count("\n") for path in sources(*PACKAGES)}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_says_what_it_is_for_in_at_most_five_lines() -> None:
    undocumented, long_winded = [], []
    for path in sources(*PACKAGES):
        text = path.read_text()
        docstring = ast.get_docstring(ast.parse(text)) or ""
        prose = [line for line in docstring.splitlines() if line and not line.startswith((" ", "├", "│", "└"))]
        if text and not prose:
            undocumented.append(str(path))
        if len(prose) > 5:
            long_winded.append(str(path))
    assert (undocumented, long_winded) == ([], [])


def test_every_test_file_mirrors_a_module() -> None:
    strays = [
        str(path)
        for package in PACKAGES
        for path in sorted(Path("tests", package).rglob("test_*.py"))
        if path.stem not in WHOLE_PATH_TESTS.get(package, ()) and not _mirrored(Path(package), path.stem)
    ]
    assert strays == []


def _mirrored(package: Path, test_name: str) -> bool:
    """Whether ``test_NAME`` or ``test_NAME_subject`` has its NAME.py or directory somewhere in the package."""
    modules = {path.stem for path in package.rglob("*") if path.suffix == ".py" or path.is_dir()}
    words = test_name.removeprefix("test_").split("_")
    return any("_".join(words[:count]) in modules for count in range(1, len(words) + 1))


def test_no_bytecode_or_result_of_a_run_is_tracked(tracked_files: list[Path]) -> None:
    assert [str(path) for path in tracked_files if path.suffix in {".pyc", ".log", ".sock", ".safetensors"}] == []
