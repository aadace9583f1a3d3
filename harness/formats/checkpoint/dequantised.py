"""Folders of the cache that hold dequantised weights as a checkpoint in HuggingFace's layout, each made once."""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from harness.base.scratch import scratch_folder
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.shards import INDEX_NAME

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 1 << 30


def made_once(folder: Path, marker: str, write: Callable[[Path], None]) -> Path:
    """Return a folder, made first if it is not there.

    `marker` is the name of a file that a complete one has; `write` fills an empty folder.

    Raises:
        HarnessError: CANNOT_WRITE; whatever `write` raises.
    """
    if (folder / marker).is_file():
        return folder
    cache = folder.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".making-", cache) as making:
            made = making / "checkpoint"
            made.mkdir()
            write(made)
            with suppress(OSError):  # another process was faster: its folder is the same
                made.rename(folder)
    except OSError as error:
        what = f"the dequantised checkpoint cannot be written: {error.strerror}"
        raise HarnessError(Code.CANNOT_WRITE, what, where=cache, hint="set HARNESS_CACHE") from error
    return folder


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
        if sum(each.nbytes for each in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    table = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / INDEX_NAME).write_text(json.dumps(table), encoding="utf-8")
