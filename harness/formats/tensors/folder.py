"""A folder of dumped tensors, nested or not, with one tensor a file or many."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.errors import Code, HarnessError
from harness.formats.tensors.files import READERS

SUFFIXES = tuple(READERS)
"""Of files that may hold tensors."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a folder."""

    name: str
    """Path of the file in the folder, and the name in the file: `Pass00000.pt: lm_head`."""
    tensor: torch.Tensor
    """Of any floating-point dtype and shape; a mapping of the file where the format allows it: read it only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFiles:
    """What a folder holds."""

    tensors: tuple[NamedTensor, ...]
    left_out: tuple[str, ...]
    """Files and tensors that were not read, each with the reason."""


def read_tensors(folder: Path) -> TensorFiles:
    """Read all tensors of floating-point numbers in a folder and the folders in it.

    Raises:
        HarnessError: BAD_TENSOR_FOLDER: there is no such folder, a link leads out of it, two tensors have one name, or
            it has none; BAD_TENSOR_FILE: a file is damaged, would run code, or has a tensor that is too large;
            DAMAGED_SAFETENSORS.
    """
    tensors: dict[str, NamedTensor] = {}
    left_out: list[str] = []
    for path in _files(folder):
        shown = str(path.relative_to(folder))
        read = READERS.get(path.suffix.lower())
        if read is None or not path.is_file():
            left_out.append(f"{shown}: no file of tensors" if path.is_file() else f"{shown}: no regular file")
            continue
        for inner, tensor in read(path):
            name = f"{shown}: {inner}" if inner else shown
            if isinstance(tensor, str):
                left_out.append(f"{name}: {tensor}")
            elif name in tensors:
                _refuse("two tensors have one name", where=path, actual=inner, hint="give each a name of its own")
            else:
                tensors[name] = NamedTensor(name, tensor)
    if not tensors:
        suffixes = ", ".join(READERS)
        actual = f"{len(left_out)} others: {'; '.join(left_out[:3])}" if left_out else "an empty folder"
        _refuse(
            "the folder has no tensors", where=folder, expected=f"floating-point tensors in {suffixes}", actual=actual
        )
    return TensorFiles(tensors=tuple(tensors.values()), left_out=tuple(left_out))


def _files(folder: Path) -> Iterator[Path]:
    """Go through the files in the order of their names; links to other folders are not followed."""
    if not folder.is_dir():
        what = "the path is not a folder" if folder.exists() else "there is no such folder"
        _refuse(what, where=folder, expected=f"a folder of {', '.join(READERS)}")
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            _refuse("a link leads out of the folder", where=path, actual=path.resolve(), hint="copy the file")
        if not path.is_dir():
            yield path


def _refuse(what: str, *, where: Path, expected: object = None, actual: object = None, hint: str | None = None) -> None:
    hint = hint or "give the folder that the engine's dump was written to"
    raise HarnessError(Code.BAD_TENSOR_FOLDER, what, where=where, expected=expected, actual=actual, hint=hint)
