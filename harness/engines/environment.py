"""What the numbers of an engine's run depend on, as far as it is known without importing anything."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version


def environment() -> dict[str, str | int]:
    """Return versions, and threads, instruction set and device where the engine has imported torch."""
    found: dict[str, str | int] = {"cores": os.cpu_count() or 0, "python": sys.version.split()[0]}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        found |= {
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        }
    return found
