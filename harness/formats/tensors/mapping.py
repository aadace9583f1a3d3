"""Tensors in files, mapped into memory: a file may be larger than the machine's memory."""

from pathlib import Path
from typing import NoReturn

import torch

from harness.errors import Code, HarnessError

MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that is read: more than the logits of 8,000 tokens in a vocabulary of 250,000, in float32."""
_MAP_FROM_BYTES = 1 << 20
"""Smaller tensors are copied: a process has a limited number of mappings."""


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is mapped into memory, or its copy where it is small."""
    return tensor if tensor.nbytes >= _MAP_FROM_BYTES else tensor.clone()


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
