"""Files of `torch.save` that hold tensors, in lists and dicts or not; what would run code is refused."""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from harness.formats.tensors.mapping import check_size, refuse

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEPTH = 8


def read(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield the tensors of a file, named by their keys and places: `model.layers.0.mlp`, `outputs.1`."""
    for name, tensor in _tensors(_load(path), "", 0):
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.dtype in _DTYPES
        if not is_plain or not tensor.numel():
            yield name, f"no floating-point numbers ({tensor.dtype}, {tensor.device}, shape {list(tensor.shape)})"
        else:
            check_size(path, name, tensor.numel() * tensor.itemsize)
            yield name, tensor.detach()


def _load(path: Path) -> object:
    try:
        with warnings.catch_warnings(action="ignore"):  # of other versions of pickle
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_archive(path))
    except pickle.UnpicklingError as error:
        if "Unsupported" not in (why := " ".join(str(error).split())) and "GLOBAL" not in why:
            refuse(path, f"the file cannot be read: {why[:200]}")
        hint = "save tensors alone, in dicts and lists: torch.save({name: tensor, ...}, path)"
        refuse(path, "the file holds more than tensors, and reading it would run code", actual=_asked(why), hint=hint)
    except Exception as error:  # whatever torch raises on a damaged archive
        refuse(path, f"the file cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}")


def _is_archive(path: Path) -> bool:
    """Whether the file can be mapped: torch's format since 1.6; older ones are read whole."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            return True
    check_size(path, "", path.stat().st_size)
    return False


def _asked(why: str) -> str:
    """Return what the file asks for, of torch's long message."""
    _, found, after = why.partition("GLOBAL ")
    return after.split(" ")[0] if found else why[why.rfind("Unsupported") :][:60]


def _tensors(value: object, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _DEPTH and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in items:
            yield from _tensors(each, f"{name}.{key}" if name else str(key), depth + 1)
