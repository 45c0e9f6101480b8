"""What watches a worker watches numbers that are there: rules, dashboard, runbook, Flower."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import promql_parser
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from schemas.records import RowStatus
from tests.worker.lab import Lab, until
from worker.metrics import OUTCOMES, Metrics

GRAFANA_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h"}


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of all series of a worker, and the one that Prometheus adds."""
    families = text_string_to_metric_families(generate_latest(Metrics().registry).decode())
    return {sample.name for family in families for sample in family.samples} | {"up"}


def selectors(expression: Any) -> Iterator[Any]:
    """Every vector selector of a PromQL expression."""
    if isinstance(expression, promql_parser.VectorSelector):
        yield expression
    for name in ("expr", "lhs", "rhs", "args", "vector_selector"):
        found = getattr(expression, name, None)
        for part in found if isinstance(found, list) else [found]:
            if part is not None:
                yield from selectors(part)


def check(query: str, exported: set[str]) -> None:
    for variable, value in GRAFANA_VARIABLES.items():
        query = query.replace(variable, value)
    found = list(selectors(promql_parser.parse(query)))
    assert found
    assert {selector.name for selector in found} <= exported
    for name, values in {"status": set(RowStatus), "outcome": set(OUTCOMES)}.items():
        for matched in re.findall(rf'{name}[!=]~?"([^"]*)"', query):
            assert set(matched.split("|")) <= values, f"{query} names an unknown {name}"


def rules(repo_root: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load((repo_root / "ops" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_every_alert_asks_for_numbers_that_are_there_and_has_a_section_in_the_runbook(
    repo_root: Path, exported: set[str]
) -> None:
    found = rules(repo_root)
    sections = re.findall(r"^### (\w+)$", (repo_root / "ops" / "runbook.md").read_text(), flags=re.MULTILINE)
    assert sections == [rule["alert"] for rule in found]
    for rule in found:
        check(rule["expr"], exported)
        assert rule["annotations"]["runbook"] == f"ops/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_panel_asks_for_numbers_that_are_there(repo_root: Path, exported: set[str]) -> None:
    dashboard = json.loads((repo_root / "ops" / "grafana" / "nightmill.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    for query in queries:
        check(query, exported)
    shown = {name for query in queries for name in exported if name in query}
    hidden = {name for name in exported if not name.endswith(("_created", "_sum", "_count"))} - shown
    assert hidden == set(), "numbers that no panel shows"


def test_panels_lie_beside_each_other(repo_root: Path) -> None:
    panels = json.loads((repo_root / "ops" / "grafana" / "nightmill.json").read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_an_unknown_number_or_a_wrong_query_is_seen(exported: set[str]) -> None:
    for query in ("nightmill_rows", 'nightmill_rows_total{status="fine"}', "sum(rate(nightmill_rows_total[5m])"):
        with pytest.raises((AssertionError, ValueError)):
            check(query, exported)


def test_prometheus_reads_the_rules_and_finds_the_workers_of_the_compose_file(repo_root: Path) -> None:
    configuration = yaml.safe_load((repo_root / "ops" / "prometheus.yml").read_text())
    compose = yaml.safe_load((repo_root / "docker-compose.yml").read_text())
    assert all((repo_root / "ops" / name).is_file() for name in configuration["rule_files"])
    (job,) = configuration["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert job["job_name"] == "nightmill"
    for name in discovery["names"]:
        environment = compose["services"][name]["environment"]
        assert environment["NIGHTMILL_WORKER__METRICS_PORT"] == str(discovery["port"])
        assert environment["NIGHTMILL_WORKER__METRICS_HOST"] == "0.0.0.0"
    (provider,) = yaml.safe_load(
        (repo_root / "ops" / "grafana" / "provisioning" / "dashboards" / "nightmill.yml").read_text()
    )["providers"]
    mounts = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert any(mount.startswith(provider["options"]["path"] + "/") for mount in mounts)


def test_flower_sees_the_workers(tmp_path: Path, repo_root: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lab = Lab(tmp_path)
    command = [sys.executable, "-m", "celery", "-A", "worker", "flower", "--address=127.0.0.1", f"--port={port}"]
    environment = lab.environment | {"FLOWER_UNAUTHENTICATED_API": "true"}
    with (tmp_path / "flower.log").open("w") as log:
        flower = subprocess.Popen(command, cwd=repo_root, env=environment, stdout=log, stderr=log)

    def workers() -> dict[str, Any]:
        assert flower.poll() is None, (tmp_path / "flower.log").read_text()
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/workers?refresh=1", timeout=10) as answer:
                return dict(json.loads(answer.read()))
        except (URLError, ConnectionError, TimeoutError):
            return {}

    try:
        lab.worker()
        assert until(workers, "Flower to see the worker").keys() == {"w1@lab"}
    finally:
        flower.terminate()
        flower.wait()
        lab.close()
