"""The safetensors files of a checkpoint, and the place of each tensor in them."""

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.refusals import bad_config, not_a_checkpoint
from harness.formats.checkpoint.table import read_table
from harness.formats.safetensors_header import Header, TensorEntry

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The safetensors files of a checkpoint."""

    files: tuple[Path, ...]
    """The single one, or those that the index names, by name."""
    file_of: Mapping[str, Path] = field(default_factory=dict)
    """The shard of each tensor, by the index; empty for a single file, which has no index."""


def read_shard_index(folder: Path) -> ShardIndex:
    """Return the safetensors files of a checkpoint, all of which exist inside of the folder.

    Raises:
        HarnessError: NOT_A_CHECKPOINT without weights, BAD_CONFIG for a bad index, MISSING_SHARD.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return ShardIndex(files=(folder / WEIGHTS_NAME,))
    path = folder / INDEX_NAME
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f"convert {others[0]} to safetensors" if others else "pass the folder that holds the safetensors files"
        not_a_checkpoint(f"the folder has neither {WEIGHTS_NAME} nor {INDEX_NAME}", folder, hint)
    weight_map = read_table(path)[0].get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        bad_config("the index has no weight_map", path, reprlib.repr(weight_map))
    for tensor, file in weight_map.items():
        _check_shard(folder, tensor, file)
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    return ShardIndex(files=files, file_of={tensor: folder / file for tensor, file in weight_map.items()})


def locate_tensors(index: ShardIndex, headers: Mapping[Path, Header]) -> dict[str, tuple[TensorEntry, Path]]:
    """Return for every tensor its entry and the shard that holds it.

    Raises:
        HarnessError: TENSORS_CONTRADICT_CONFIG where index and shards disagree.
    """
    found: dict[str, tuple[TensorEntry, Path]] = {}
    for shard, header in headers.items():
        for entry in header.tensors:
            if entry.name in found:
                _contradiction("two shards hold the same tensor", shard, entry.name, found[entry.name][1].name)
            found[entry.name] = (entry, shard)
    for name, file in index.file_of.items():
        if name not in found:
            _contradiction("the index names a tensor that its shard lacks", file, name, None)
        if found[name][1].name != file.name:
            _contradiction("a tensor is in another shard than the index says", file, name, found[name][1])
    return found


def _check_shard(folder: Path, tensor: str, file: object) -> None:
    where = f"{folder / INDEX_NAME}: weight_map.{reprlib.repr(tensor)}"
    if not isinstance(file, str) or not file.endswith(".safetensors") or "\0" in file:
        bad_config("the index names no safetensors file", where, reprlib.repr(file))
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:  # not resolved: hub caches are links
        bad_config("a shard lies outside of the checkpoint's folder", where, reprlib.repr(file))
    try:
        is_there = (folder / file).is_file()
    except OSError as error:  # a name too long
        bad_config(f"the index names no file: {error.strerror}", where, reprlib.repr(file))
    if not is_there:
        raise HarnessError(
            Code.MISSING_SHARD,
            f"the shard {file} is missing",
            where=folder,
            expected=f"{file}, which holds {tensor} and others",
            actual=", ".join(sorted(shard.name for shard in folder.glob("*.safetensors"))) or "no safetensors files",
            hint="download the checkpoint again",
        )


def _contradiction(what: str, where: object, expected: object, actual: object) -> NoReturn:
    hint = f"write {INDEX_NAME} again, or download the checkpoint again"
    raise HarnessError(Code.TENSORS_CONTRADICT_CONFIG, what, where=where, expected=expected, actual=actual, hint=hint)


def read_shard(path: Path, name: str) -> "torch.Tensor":
    """Return a tensor of a shard whose header was read before.

    Raises:
        HarnessError: MISSING_SHARD, DAMAGED_SAFETENSORS: the file has gone since, or is another one now.
    """
    from safetensors import safe_open

    with reading_shard(path), safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@contextmanager
def reading_shard(path: Path) -> Iterator[None]:
    """Say of what the library raises in the block that the file has gone or was changed; raises as `read_shard`."""
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError as error:
        raise HarnessError(Code.MISSING_SHARD, f"the file is gone: {error}", where=path) from error
    except (SafetensorError, OSError) as error:
        raise HarnessError(Code.DAMAGED_SAFETENSORS, f"the file was changed: {error}", where=path) from error
