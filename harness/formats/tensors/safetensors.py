"""Safetensors files of dumped tensors."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from harness.formats.safetensors_header import read_header
from harness.formats.tensors.mapping import check_size, kept, refuse

_DTYPES = ("F64", "F32", "F16", "BF16")


def read(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield the names and tensors of a file, or why one is left out.

    Raises:
        HarnessError: DAMAGED_SAFETENSORS; BAD_TENSOR_FILE: a tensor is too large, or a dtype unknown to safetensors.
    """
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            for entry in header.tensors:
                if entry.dtype not in _DTYPES or not entry.num_bytes:
                    yield entry.name, f"no floating-point numbers ({entry.dtype}, shape {list(entry.shape)})"
                else:
                    check_size(path, entry.name, entry.num_bytes)
                    yield entry.name, kept(file.get_tensor(entry.name))
    except SafetensorError as error:
        refuse(path, f"the file cannot be read: {error}")
