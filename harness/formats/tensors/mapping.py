"""Tensors in files, mapped into memory: a file may be larger than the machine's memory."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from harness.errors import Code, HarnessError

MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that is read: more than the logits of 8,000 tokens in a vocabulary of 250,000, in float32."""
_MAP_FROM_BYTES = 1 << 20
"""Smaller tensors are read: a process has a limited number of mappings."""


def map_tensor(path: Path, name: str, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose elements begin at byte `offset` of a file, in row-major order and the machine's byte order.

    Raises:
        HarnessError: BAD_TENSOR_FILE: it is too large.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    check_size(path, name, num_bytes)
    if num_bytes >= _MAP_FROM_BYTES:
        own = torch.from_file(str(path), shared=False, size=offset + num_bytes, dtype=torch.uint8)[offset:]
        return (own.clone() if offset % dtype.itemsize else own).view(dtype).reshape(tuple(shape))
    with path.open("rb") as file:
        file.seek(offset)
        content = bytearray(file.read(num_bytes))
    if len(content) < num_bytes:
        refuse(path, "the file is truncated", expected=f"{num_bytes} bytes of {name or 'data'}", actual=len(content))
    return torch.frombuffer(content, dtype=dtype).reshape(tuple(shape))


def check_size(path: Path, name: str, num_bytes: int) -> None:
    """Refuse a tensor, or a file that cannot be mapped, that is too large."""
    if num_bytes > MAX_TENSOR_BYTES:
        refuse(
            path,
            f"{f'the tensor {name!r}' if name else 'the tensor'} is too large",
            expected=f"at most {MAX_TENSOR_BYTES:,} bytes",
            actual=f"{num_bytes:,} bytes",
            hint="dump a shorter prompt, or leave this tensor out",
        )


def refuse(
    path: Path, what: str, *, expected: object = None, actual: object = None, hint: str | None = None
) -> NoReturn:
    """Raise BAD_TENSOR_FILE."""
    hint = hint or "write the file again, or remove it from the folder"
    raise HarnessError(Code.BAD_TENSOR_FILE, what, where=path, expected=expected, actual=actual, hint=hint)
