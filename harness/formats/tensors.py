"""Tensors that people have dumped: a folder of `.npy`, `.npz`, `.safetensors` and `.pt` files, nested or not.

The files are mapped into memory, which may be smaller than a file. Each reader yields the names in a file and their
tensors, or why one is left out. What would run code is refused: nothing is unpickled.
"""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from harness.errors import Code, HarnessError
from harness.formats.safetensors_header import read_header

_MAX_TENSOR_BYTES = 8 << 30
"""Largest tensor that is read: more than the logits of 8,000 tokens in a vocabulary of 250,000, in float32."""
_MAP_FROM_BYTES = 1 << 20
"""Smaller tensors are copied: a process has a limited number of mappings."""
_OF_NUMPY = ("float16", "float32", "float64")
_OF_SAFETENSORS = ("F64", "F32", "F16", "BF16")
_OF_TORCH = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEPTH = 8
"""Of lists and dicts in a file of torch."""


def _numpy_array(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield the array of `np.save`, which has the empty name; objects, which need pickle, are refused."""
    array = _mapped(path)
    if array.dtype.hasobject:
        hint = "np.save(path, array.astype(np.float32))"
        _refuse(path, "the array holds Python objects, which are never unpickled", actual=array.dtype, hint=hint)
    yield "", _of_array(path, "", array)


def _numpy_archive(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield the arrays of `np.savez`, each read when its turn comes."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for member in archive.zip.infolist():
                name = member.filename.removesuffix(".npy")
                _check_size(path, name, member.file_size)
                yield name, _of_array(path, name, archive[name])
    except HarnessError:
        raise
    except Exception as error:  # zipfile and its decompressors may raise anything on a damaged archive
        _refuse(path, f"the archive cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}")


def _of_array(path: Path, name: str, array: np.ndarray) -> torch.Tensor | str:
    if not isinstance(array, np.ndarray) or array.dtype.name not in _OF_NUMPY or not array.size:
        return f"no floating-point numbers ({getattr(array, 'dtype', 'bytes')}, shape {list(np.shape(array))})"
    _check_size(path, name, array.nbytes)
    return torch.from_numpy(np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C"))


def _mapped(path: Path) -> np.memmap:
    """Return the array; an empty one, or one of objects, is no mapping and has no content."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read_array_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, _is_fortran, dtype = read_array_header(file)
        if dtype.hasobject or 0 in shape:
            return np.empty(0 if dtype.hasobject else shape, dtype=dtype)  # type: ignore[return-value]
        return np.load(path, mmap_mode="c", allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, EOFError, OSError, OverflowError, MemoryError, SyntaxError, TypeError, RecursionError) as error:
        _refuse(path, f"the array cannot be read: {' '.join(str(error).split())[:200]}")


def _safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    header = read_header(path)
    try:
        with safe_open(path, framework="pt") as file:
            for entry in header.tensors:
                if entry.dtype not in _OF_SAFETENSORS or not entry.num_bytes:
                    yield entry.name, f"no floating-point numbers ({entry.dtype}, shape {list(entry.shape)})"
                else:
                    _check_size(path, entry.name, entry.num_bytes)
                    yield entry.name, file.get_tensor(entry.name)
    except SafetensorError as error:
        _refuse(path, f"the file cannot be read: {error}")


def _torch_save(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield what `torch.save` wrote, named by its keys and places: `model.layers.0.mlp`, `outputs.1`."""
    for name, tensor in _nested(_loaded(path), "", 0):
        is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.dtype in _OF_TORCH
        if not is_plain or not tensor.numel():
            yield name, f"no floating-point numbers ({tensor.dtype}, {tensor.device}, shape {list(tensor.shape)})"
        else:
            _check_size(path, name, tensor.numel() * tensor.itemsize)
            yield name, tensor.detach()


def _loaded(path: Path) -> object:
    try:
        with warnings.catch_warnings(action="ignore"):  # of other versions of pickle
            return torch.load(path, map_location="cpu", weights_only=True, mmap=_is_archive(path))
    except pickle.UnpicklingError as error:
        if "Unsupported" not in (why := " ".join(str(error).split())) and "GLOBAL" not in why:
            _refuse(path, f"the file cannot be read: {why[:200]}")
        hint = "save tensors alone, in dicts and lists: torch.save({name: tensor, ...}, path)"
        _refuse(path, "the file holds more than tensors, and reading it would run code", actual=_asked(why), hint=hint)
    except Exception as error:  # torch may raise anything on a damaged archive
        _refuse(path, f"the file cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}")


def _is_archive(path: Path) -> bool:
    """Whether the file can be mapped: torch's format since 1.6; older ones are read whole."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            return True
    _check_size(path, "", path.stat().st_size)
    return False


def _asked(why: str) -> str:
    """Return what the file asks for, of torch's long message."""
    _, is_global, after = why.partition("GLOBAL ")
    return after.split(" ")[0] if is_global else why[why.rfind("Unsupported") :][:60]


def _nested(value: object, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth < _DEPTH and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _nested(item, f"{name}.{key}" if name else str(key), depth + 1)


READERS: dict[str, Callable[[Path], Iterator[tuple[str, torch.Tensor | str]]]] = {
    ".npy": _numpy_array,
    ".npz": _numpy_archive,
    ".safetensors": _safetensors,
    ".pt": _torch_save,
    ".pth": _torch_save,
}
"""By the suffix of a file. They raise HarnessError: BAD_TENSOR_FILE, or DAMAGED_SAFETENSORS."""


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is mapped into memory, or its copy where it is small."""
    return tensor if tensor.nbytes >= _MAP_FROM_BYTES else tensor.clone()


def _check_size(path: Path, name: str, num_bytes: int) -> None:
    """Refuse a tensor, or a file that cannot be mapped, that is too large."""
    if num_bytes > _MAX_TENSOR_BYTES:
        _refuse(
            path,
            f"{f'the tensor {name!r}' if name else 'the tensor'} is too large",
            expected=f"at most {_MAX_TENSOR_BYTES:,} bytes",
            actual=f"{num_bytes:,} bytes",
            hint="dump a shorter prompt, or leave this tensor out",
        )


def _refuse(
    path: Path, what: str, *, expected: object = None, actual: object = None, hint: str | None = None
) -> NoReturn:
    hint = hint or "write the file again, or remove it from the folder"
    raise HarnessError(Code.BAD_TENSOR_FILE, what, where=path, expected=expected, actual=actual, hint=hint)


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
    source = TensorFolder(folder)
    tensors = tuple(NamedTensor(item.name, _kept(item.tensor)) for item in source.tensors())
    return TensorFiles(tensors=tensors, left_out=tuple(source.left_out))


class TensorFolder:
    """The tensors of a folder, one at a time: a folder may be larger than memory."""

    def __init__(self, folder: Path) -> None:
        """Look at the files; raises as `read_tensors`."""
        self.path = folder
        self.left_out: list[str] = []
        """Files and tensors that were not read, each with the reason."""
        self.places: dict[str, tuple[Path, str]] = {}
        """File of each tensor that was read, and the name in it, which may be empty."""
        self._stamps = _stamps(folder)
        self._cursor: tuple[Path, Iterator[tuple[str, torch.Tensor | str]]] | None = None

    def tensors(self) -> Iterator[NamedTensor]:
        """Go through the tensors, file by file in the order of their names; raises as `read_tensors`."""
        for path in self._stamps:
            shown = str(path.relative_to(self.path))
            read = READERS.get(path.suffix.lower())
            if read is None or not path.is_file():
                self.left_out.append(f"{shown}: no file of tensors" if path.is_file() else f"{shown}: no regular file")
                continue
            for inner, tensor in read(path):
                name = f"{shown}: {inner}" if inner else shown
                if isinstance(tensor, str):
                    self.left_out.append(f"{name}: {tensor}")
                elif name in self.places:
                    what, hint = "two tensors have one name", "give each a name of its own"
                    _refuse_folder(what, where=path, actual=inner, hint=hint)
                else:
                    self.places[name] = path, inner
                    yield NamedTensor(name, tensor)
        if not self.places:
            suffixes, left = ", ".join(READERS), self.left_out
            actual = f"{len(left)} others: {'; '.join(left[:3])}" if left else "an empty folder"
            expected = f"floating-point tensors in {suffixes}"
            _refuse_folder("the folder has no tensors", where=self.path, expected=expected, actual=actual)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor again; the next one of the same file is near. Raises as `read_tensors`."""
        path, inner = self.places[name]
        for _from_the_begin in (False, True):
            if self._cursor is None or self._cursor[0] != path:
                self._cursor = path, READERS[path.suffix.lower()](path)
            for at, tensor in self._cursor[1]:
                if at == inner and isinstance(tensor, torch.Tensor):
                    return tensor
            self._cursor = None
        self.check_unchanged()
        raise AssertionError(f"{path} has lost {inner!r}")

    def check_unchanged(self) -> None:
        """Refuse files that were written since; raises HarnessError (BAD_TENSOR_FILE)."""
        changed = dict(_stamps(self.path).items() ^ self._stamps.items())
        if changed:
            hint = "compare when the program that writes the folder has ended"
            _refuse(min(changed), "the file was changed while it was read", hint=hint)


def _stamps(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Return, for each file, what changes when it is written again."""
    stats = {path: path.lstat() for path in _files(folder)}
    return {path: (stat.st_mtime_ns, stat.st_size, stat.st_ino) for path, stat in stats.items()}


def _files(folder: Path) -> Iterator[Path]:
    """Go through the files in the order of their names; links to other folders are not followed."""
    if not folder.is_dir():
        what = "the path is not a folder" if folder.exists() else "there is no such folder"
        _refuse_folder(what, where=folder, expected=f"a folder of {', '.join(READERS)}")
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            _refuse_folder("a link leads out of the folder", where=path, actual=path.resolve(), hint="copy the file")
        if not path.is_dir():
            yield path


def _refuse_folder(
    what: str, *, where: Path, expected: object = None, actual: object = None, hint: str | None = None
) -> None:
    hint = hint or "give the folder that the engine's dump was written to"
    raise HarnessError(Code.BAD_TENSOR_FOLDER, what, where=where, expected=expected, actual=actual, hint=hint)


__all__ = ["NamedTensor", "TensorFiles", "TensorFolder", "read_tensors"]
