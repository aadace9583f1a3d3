"""Safetensors files of dumped tensors."""

from collections.abc import Iterator
from pathlib import Path

import torch

from harness.formats.safetensors_header import read_header
from harness.formats.tensors.mapping import map_tensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield the names and tensors of a file, or why one is left out.

    Raises:
        HarnessError: DAMAGED_SAFETENSORS.
    """
    header = read_header(path)
    for entry in header.tensors:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None or not entry.num_bytes:
            yield entry.name, f"no floating-point numbers ({entry.dtype}, shape {list(entry.shape)})"
        else:
            yield entry.name, map_tensor(path, entry.name, header.data_offset + entry.begin, dtype, entry.shape)
