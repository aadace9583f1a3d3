"""Tensors of a GGUF file as torch has them: dequantised, in the order of HuggingFace's rows."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.header import GGUFTensor
from harness.extensions.llamacpp.gguf.types import BY_NAME, PLAIN

if TYPE_CHECKING:
    import torch


def gguf_package() -> Any:
    """Return the package gguf.

    Raises:
        HarnessError: PACKAGE_MISSING.
    """
    try:
        import gguf
    except ImportError as error:
        raise missing_package("gguf", error) from error
    return gguf


def missing_package(
    name: str,
    error: ImportError,
    hint: str = "pip install -e '.[llamacpp]' in the harness's checkout; for gguf alone, pip install gguf",
) -> HarnessError:
    """Return the error for an optional package that is not installed."""
    return HarnessError(
        Code.PACKAGE_MISSING,
        f"the package {name} is not installed",
        where=name,
        actual=str(error),
        hint=hint,
    )


def read_tensor(tensor: GGUFTensor, path: Path) -> "torch.Tensor":
    """Return a tensor in float32, float16 or bfloat16 where the file has that, dequantised to float32 otherwise.

    Raises:
        HarnessError: PACKAGE_MISSING, or UNSUPPORTED_GGUF for a type that cannot be dequantised.
    """
    import torch

    data = np.fromfile(path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.begin)
    if tensor.type.name in PLAIN:
        return torch.from_numpy(data).view(getattr(torch, PLAIN[tensor.type.name])).reshape(tensor.shape)
    return torch.from_numpy(_dequantised(tensor, data, path)).reshape(tensor.shape)


def _dequantised(tensor: GGUFTensor, data: Any, path: Path) -> Any:
    gguf = gguf_package()
    number, kind = BY_NAME[tensor.type.name]
    rows = data.reshape(-1, tensor.shape[-1] // kind.block_size * kind.block_bytes)
    try:
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(number)).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise HarnessError(
            Code.UNSUPPORTED_GGUF,
            f"tensors of the type {tensor.type.name} cannot be dequantised",
            where=f"{path}: tensor {tensor.name!r}",
            actual=str(error),
            hint="update the package gguf, or quantise to another type",
        ) from error


def rows_of_hf(weight: "torch.Tensor", num_heads: int) -> "torch.Tensor":
    """Put rows of interleaved rotary pairs, [heads * head_dim, ...], in HF's order: both halves after each other."""
    return weight.reshape(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def rows_of_gguf(weight: "torch.Tensor", num_heads: int) -> "torch.Tensor":
    """Put HF's rows of q or k, [heads * head_dim, ...], in the order of interleaved rotary pairs."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
