"""What the numbers of a run depend on besides its inputs."""

import os

import torch
import transformers


def environment() -> dict[str, str | int]:
    """Return versions, threads, instruction set and device."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "cores": os.cpu_count() or 0,
    }
