"""Print, as one JSON object, what torch and the kernels find on this machine. Run by the doctor in its own process.

A crash of a driver or a library ends this process only. Knows nothing of the report.
"""

import json
from typing import Any


def probe() -> dict[str, Any]:
    """Versions, devices and the chosen kernels of each device."""
    import torch

    from kernels.select import select_kernels

    devices = [("cpu", torch.float32)]
    devices += [(f"cuda:{index}", torch.bfloat16) for index in range(torch.cuda.device_count())]
    found = []
    for name, dtype in devices:
        device = torch.device(name)
        kernels, choices = select_kernels(device, dtype, "auto")
        found.append(
            {
                "device": name,
                "description": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu(torch),
                "kernels": kernels.name,
                "choices": [{"operation": c.operation, "backend": c.backend, "reason": c.reason} for c in choices],
            }
        )
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": found}


def _cpu(torch: Any) -> str:
    return f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    print(json.dumps(probe()))
