"""A model as GGUF: one file, or several shards, with their metadata and tensors together.

Tensors come as torch has them: dequantised, in the order of HuggingFace's rows.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.architecture import Metadata
from harness.extensions.llamacpp.gguf.header import BY_NAME, PLAIN, GGUFHeader, GGUFTensor, damaged, read_gguf_header

if TYPE_CHECKING:
    import torch


SUFFIX = ".gguf"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class GGUFModel:
    """All files of one model."""

    headers: tuple[GGUFHeader, ...]

    @property
    def path(self) -> Path:
        """The first file, which llama.cpp is given."""
        return self.headers[0].path

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata of the first file; the others repeat nothing of it."""
        return Metadata(self.headers[0].metadata, self.path)

    @cached_property
    def tensors(self) -> Mapping[str, tuple[GGUFTensor, Path]]:
        """Every tensor and the file that holds it, by name."""
        by_name: dict[str, tuple[GGUFTensor, Path]] = {}
        for header in self.headers:
            for tensor in header.tensors:
                if tensor.name in by_name:
                    damaged(f"{header.path}: tensor {tensor.name!r}", "two files hold the same tensor")
                by_name[tensor.name] = (tensor, header.path)
        return by_name

    @property
    def formats(self) -> tuple[str, ...]:
        """Types of the tensors that are not in float32, sorted."""
        return tuple(sorted({tensor.type.name for tensor, _ in self.tensors.values()} - {"F32"}))

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(header.file_bytes for header in self.headers)

    @property
    def bits_per_weight(self) -> float:
        """Bits of all tensors over their elements."""
        tensors = [tensor for tensor, _ in self.tensors.values()]
        return 8 * sum(tensor.num_bytes for tensor in tensors) / max(1, sum(item.num_elements for item in tensors))


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix == SUFFIX and path.is_file()


def open_gguf(path: Path) -> GGUFModel:
    """Read the headers of a GGUF file and of the shards beside it.

    Raises:
        HarnessError: DAMAGED_GGUF, UNSUPPORTED_GGUF, or MISSING_SHARD.
    """
    model = GGUFModel(tuple(read_gguf_header(file) for file in _files(path)))
    _ = model.tensors  # that no tensor is there twice
    return model


def _files(path: Path) -> list[Path]:
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
    for name in names:
        if not (path.parent / name).is_file():
            raise HarnessError(
                Code.MISSING_SHARD,
                f"the shard {name} is missing",
                where=path.parent,
                expected=f"{count} shards",
                hint="download the model again",
            )
    return [path.parent / name for name in names]


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
