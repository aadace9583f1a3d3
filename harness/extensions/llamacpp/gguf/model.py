"""A model as GGUF: one file, or several shards, with their metadata and tensors together."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.architecture import Metadata
from harness.extensions.llamacpp.gguf.header import GGUFHeader, GGUFTensor, damaged, read_gguf_header

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
        found: dict[str, tuple[GGUFTensor, Path]] = {}
        for header in self.headers:
            for tensor in header.tensors:
                if tensor.name in found:
                    damaged(f"{header.path}: tensor {tensor.name!r}", "two files hold the same tensor")
                found[tensor.name] = (tensor, header.path)
        return found

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
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    names = [f"{found['stem']}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]
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
