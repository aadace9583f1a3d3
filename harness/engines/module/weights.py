"""Dtype and device of a module, from its own tensors."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.formats.case import DTYPES

Device = str | torch.device | None


def module_dtype(module: nn.Module, wanted: str = "auto") -> str | None:
    """Return the dtype that most elements of a module's weights have; None for a module without weights.

    Args:
        module: any.
        wanted: one of `case.DTYPES`, or `auto` for the module's own.

    Raises:
        HarnessError: BAD_OPTION: the module has another one than is wanted; ENGINE_CANNOT_SERVE: it has one that there
            is no oracle for, or its weights are on the meta device.
    """
    counts = Counter[torch.dtype]()
    for _, tensor in _weights(module):
        counts[tensor.dtype] += tensor.numel()
    if not counts:
        return None if wanted == "auto" else wanted
    name = str(counts.most_common(1)[0][0]).removeprefix("torch.")
    if name not in DTYPES:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"the module computes in {name}",
            where=type(module).__name__,
            expected=" or ".join(DTYPES),
            actual=name,
            hint="module.float(), or another dtype of these",
        )
    if wanted not in ("auto", name):
        raise HarnessError(
            Code.BAD_OPTION,
            "the module's weights have another dtype than was asked for",
            where=f"dtype= of {type(module).__name__}",
            expected=wanted,
            actual=name,
            hint=f'dtype="{name}", or convert the module: module.to(torch.{wanted})',
        )
    return name


def module_device(module: nn.Module, wanted: Device = None) -> str | None:
    """Return the device of a module's weights; None for a module without weights and without a wanted device.

    Args:
        module: any.
        wanted: a device, which may leave its number out; None for the module's own.

    Raises:
        HarnessError: BAD_OPTION: the module is on another device; ENGINE_CANNOT_SERVE: it is on several.
    """
    devices = list(dict.fromkeys(tensor.device for _, tensor in _weights(module)))
    if len(devices) > 1:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "the module's weights are on several devices",
            where=type(module).__name__,
            expected="one device",
            actual=", ".join(map(str, devices)),
            hint=f'module.to("{devices[0]}")',
        )
    if not devices:
        return None if wanted is None else str(wanted)
    if wanted is not None and not _is_same(_device(wanted), devices[0]):
        raise HarnessError(
            Code.BAD_OPTION,
            "the module is on another device than was asked for",
            where=f"device= of {type(module).__name__}",
            expected=wanted,
            actual=devices[0],
            hint=f'module.to("{wanted}"), or leave device= out',
        )
    return str(devices[0])


def check_has_values(module: nn.Module) -> None:
    """Refuse a module whose weights have no values.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: a weight is on the meta device.
    """
    names = [name for name, tensor in _weights(module) if tensor.is_meta]
    if names:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"{len(names)} weights of the module are on the meta device, without values",
            where=f"{type(module).__name__}.{names[0]}",
            expected="weights that are loaded",
            actual="meta",
            hint="load the checkpoint into the module first: module.to_empty(...), then load_state_dict",
        )


def _weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, weight) for name, weight in module.named_parameters() if weight.is_floating_point())


def _device(name: str | torch.device) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise HarnessError(
            Code.BAD_OPTION, f"unknown device {name!r}", where="device=", expected="cpu or cuda", actual=name
        ) from None


def _is_same(wanted: torch.device, actual: torch.device) -> bool:
    return wanted.type == actual.type and wanted.index in (None, actual.index)
