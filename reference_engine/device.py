"""The device a model runs on, checked before anything is loaded."""

from __future__ import annotations

import torch

from reference_engine.errors import DeviceError

__all__ = ["open_device"]


def open_device(name: str) -> torch.device:
    """Return the device, with its index made explicit.

    Raises:
        DeviceError: the name is not one of a CPU or CUDA device, or there is no such device here.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise DeviceError(
            "not a device", where="EngineConfig.device", expected="cpu, cuda, cuda:N", actual=name
        ) from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise DeviceError("unsupported device", where="EngineConfig.device", expected="cpu, cuda, cuda:N", actual=name)
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= num_devices:
        raise DeviceError(
            "the CUDA device is not there",
            where="EngineConfig.device",
            expected=f"an index below the {num_devices} CUDA devices of this machine",
            actual=name,
            hint='Use device="cpu", or install a CUDA build of torch on a machine with a GPU.',
        )
    return torch.device("cuda", index)
