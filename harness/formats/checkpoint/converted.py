"""Folders of the cache that hold weights of another form as a checkpoint in HuggingFace's layout, each made once.

Readers write them. A folder says what it was made from, and by which reader.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.files import json_digest, scratch_folder
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.bound import hold
from harness.formats.checkpoint.cache import FileStamp
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, INDEX_NAME

if TYPE_CHECKING:
    import torch


_SHARD_BYTES = 1 << 30
_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Of the files of tokenizers, chat templates and settings of generation."""
MADE_FROM = "made_from.json"
"""Name of the file that a complete folder has: its reader, its source, and what else the reader notes."""


def folder_name(version: int, files: Iterable[Path], *more: object) -> str:
    """Return a name that changes with `version`, and whenever one of the files is written again."""
    stamps = [FileStamp.of(file) for file in sorted(files) if file.is_file()]
    return json_digest([version, *more, stamps])[:32]


def made_once(folder: Path, reader: str, write: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Return a folder, made first if it is not there.

    Args:
        folder: the folder in the cache.
        reader: name of the reader's entry point.
        write: fills an empty folder, and returns what `read_info` returns for it.

    Raises:
        HarnessError: CANNOT_WRITE; whatever `write` raises.
    """
    if (folder / MADE_FROM).is_file():
        hold(folder)  # used now: it stays until its reader holds it
        return folder
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".making-", cache) as making:
            made = making / "checkpoint"
            made.mkdir()
            info = {"schema_version": 1, "reader": reader, **write(made)}
            (made / MADE_FROM).write_text(json.dumps(info, indent=2), encoding="utf-8")
            with suppress(OSError):  # another process was faster: its folder is the same
                made.rename(folder)
    except OSError as error:
        what = f"the dequantised checkpoint cannot be written: {error.strerror}"
        raise HarnessError(Code.CANNOT_WRITE, what, where=cache, hint="set HARNESS_CACHE") from error
    return folder


def read_info(folder: Path) -> dict[str, Any]:
    """Return what a folder notes about its source; nothing for a folder that was not made here."""
    if not (folder / MADE_FROM).is_file():
        return {}
    try:
        info = json.loads((folder / MADE_FROM).read_bytes())
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


def write_settings(made: Path, config: Mapping[str, Any], origin: Path | None = None) -> None:
    """Write config.json; of the checkpoint in `origin` copy the tokenizer, and how it generates."""
    (made / CONFIG_NAME).write_text(json.dumps(config, indent=2), encoding="utf-8")
    if origin is not None:
        copy_tokenizer(origin, made)


def copy_tokenizer(origin: Path, made: Path) -> None:
    """Copy the files of the tokenizer and the generation settings that are not there already."""
    others = (CONFIG_NAME, MADE_FROM)
    for file in origin.iterdir():
        is_index = file.name.endswith(".index.json")
        if file.suffix in _SUFFIXES and file.name not in others and not is_index and not (made / file.name).exists():
            shutil.copy(file, made / file.name)


def write_shards(folder: Path, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Write tensors in files of about a GiB, and an index of them."""
    import safetensors.torch

    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        safetensors.torch.save_file(shard, folder / name)
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, values in tensors:
        shard[name] = values.contiguous()
        total += values.nbytes
        if sum(item.nbytes for item in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    table = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / INDEX_NAME).write_text(json.dumps(table), encoding="utf-8")
