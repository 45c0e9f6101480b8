"""Print, as one JSON object, what torch and the kernels find on this machine. Run by the doctor in its own process.

A crash of a driver or a library ends this process only. Knows nothing of the report.
"""

import contextlib
import importlib.metadata
import json
import subprocess
import sys
from typing import Any


def probe_apart(timeout_s: float) -> dict[str, Any]:
    """``probe`` in a process of its own. Raises subprocess.TimeoutExpired or CalledProcessError."""
    command = [sys.executable, "-m", "ops.device_probe"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def probe() -> dict[str, Any]:
    """Versions, devices, the chosen kernels of each device, and links between GPUs."""
    import torch

    devices = [_describe("cpu", _cpu(torch))]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        text = f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute capability {facts.major}.{facts.minor}"
        devices.append(_describe(f"cuda:{index}", text))
    return {"versions": _versions(torch), "devices": devices, "links": _links(torch)}


def _describe(name: str, description: str) -> dict[str, Any]:
    """With the kernels for bfloat16, which most checkpoints are in."""
    import torch

    from kernels.select import select_kernels

    kernels, choices = select_kernels(torch.device(name), torch.bfloat16, "auto")
    named = [{"operation": c.operation, "backend": c.backend, "reason": c.reason} for c in choices]
    return {"device": name, "description": description, "kernels": kernels.name, "choices": named}


def _versions(torch: Any) -> dict[str, str]:
    found = {"torch": torch.__version__}
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _ask_nvml("nvmlSystemGetDriverVersion")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # CPU builds of torch come without it
        found["triton"] = importlib.metadata.version("triton")
    return {name: version for name, version in found.items() if version}


def _links(torch: Any) -> list[dict[str, Any]]:
    """Each pair of GPUs: whether one reads the other's memory, and the NVLinks of the one that has fewer."""
    count = torch.cuda.device_count()
    nvlinks = [_num_nvlinks(index) for index in range(count)]
    return [
        {
            "pair": f"cuda:{one} - cuda:{other}",
            "is_direct": torch.cuda.can_device_access_peer(one, other),
            "num_nvlinks": min(nvlinks[one], nvlinks[other]),
        }
        for one in range(count)
        for other in range(one + 1, count)
    ]


def _num_nvlinks(index: int) -> int:
    import pynvml

    is_active = (_ask_nvml("nvmlDeviceGetNvLinkState", index, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    return sum(state == pynvml.NVML_FEATURE_ENABLED for state in is_active)


def _ask_nvml(function: str, index: int | None = None, *arguments: Any) -> Any:
    """An NVML call, of a device if ``index`` is given; None where the driver does not answer it."""
    import pynvml

    try:
        pynvml.nvmlInit()
        device = () if index is None else (pynvml.nvmlDeviceGetHandleByIndex(index),)
        return getattr(pynvml, function)(*device, *arguments)
    except pynvml.NVMLError:
        return None


def _cpu(torch: Any) -> str:
    return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    print(json.dumps(probe()))
