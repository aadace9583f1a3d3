"""Folders of the cache that hold weights of another form as a checkpoint in HuggingFace's layout, each made once.

A folder says what it was made from. Of a quantised checkpoint, the extension that reads it writes the folder; the core
runs on the folder, and asks the extension for what the checkpoint declares besides its weights.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from harness.base import plugins
from harness.base.files import json_digest, scratch_folder
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.cache import FileStamp
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, INDEX_NAME

if TYPE_CHECKING:
    import torch


_SHARD_BYTES = 1 << 30
_SUFFIXES = (".json", ".model", ".txt", ".jinja")
"""Of the files of tokenizers, chat templates and settings of generation."""
GGUF_INFO, QUANTISED_INFO, EXPORT_INFO = "gguf.json", "quantised.json", "export.json"
"""Names of the files that mark a complete folder, by what it was made from."""


def folder_name(version: int, files: Iterable[Path], *more: object) -> str:
    """Return a name that changes with `version`, and whenever one of the files is written again."""
    stamps = [FileStamp.of(file) for file in sorted(files) if file.is_file()]
    return json_digest([version, *more, stamps])[:32]


def made_once(folder: Path, marker: str, write: Callable[[Path], Mapping[str, Any]]) -> Path:
    """Return a folder, made first if it is not there.

    `marker` is the name of a file that a complete one has; `write` fills an empty folder, and returns what that file is
    to say.

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
            info = {"schema_version": 1, **write(made)}
            (made / marker).write_text(json.dumps(info, indent=2), encoding="utf-8")
            with suppress(OSError):  # another process was faster: its folder is the same
                made.rename(folder)
    except OSError as error:
        what = f"the dequantised checkpoint cannot be written: {error.strerror}"
        raise HarnessError(Code.CANNOT_WRITE, what, where=cache, hint="set HARNESS_CACHE") from error
    return folder


def read_info(folder: Path, marker: str) -> dict[str, Any]:
    """Return what the marker file of a folder says; nothing for a folder that has none."""
    if not (folder / marker).is_file():
        return {}
    try:
        info = json.loads((folder / marker).read_bytes())
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
    others = (CONFIG_NAME, GGUF_INFO, QUANTISED_INFO, EXPORT_INFO)
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


READER = "quantised"
"""Name of the reader that opens such checkpoints."""


class OpenedQuantised(Protocol):
    """A quantised checkpoint as the core needs it."""

    @property
    def cache_scales(self) -> dict[str, tuple[float, ...]]:
        """Scales of a quantised KV cache, by tap."""

    @property
    def has_declared_inputs(self) -> bool:
        """Whether inputs of products are declared to be quantised."""

    def input_ways(
        self, module: str, width: int, dtype: "torch.dtype"
    ) -> "Iterator[Callable[[torch.Tensor], torch.Tensor]]":
        """Yield functions that quantise the inputs of a module's product, in each way that the checkpoint allows.

        They take inputs [R, I] and return them in float64; `width` is I, and `dtype` the engine's. The likeliest way is
        first; none for a product whose inputs stay as they are.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedSource:
    """The quantised checkpoint that a folder was made of."""

    path: Path
    formats: tuple[str, ...]
    """Titles of the formats that were read."""
    modules: tuple[str, ...]
    """Modules whose weights were quantised, by HF's names."""
    made: str
    """Name of the folder, which changes when the checkpoint does."""

    def open(self) -> OpenedQuantised:
        """Return the quantised checkpoint, opened once in a process.

        Raises:
            HarnessError: CHECKPOINT_CHANGED: it is not that which the folder was made of; as the reader.
        """
        return cast(OpenedQuantised, plugins.load(plugins.READERS, READER).open_source(self))

    def __str__(self) -> str:
        """Say what was read, for the head of a verdict."""
        if not self.modules:
            return "the checkpoint is quantised in its KV cache alone: the weights are its own"
        named = ", ".join(self.modules[:3]) + (f" and {len(self.modules) - 3} more" if len(self.modules) > 3 else "")
        return (
            f"the weights are those of a quantised checkpoint, dequantised to float32: {' and '.join(self.formats)} in "
            f"{len(self.modules)} modules ({named})"
        )


def read_quantised_source(folder: Path) -> QuantisedSource | None:
    """Return what a folder was made of; None for one that was not made of a quantised checkpoint."""
    info = read_info(folder, QUANTISED_INFO)
    try:
        return QuantisedSource(
            path=Path(info["source"]), formats=tuple(info["formats"]), modules=tuple(info["modules"]), made=folder.name
        )
    except (KeyError, TypeError):
        return None


def served_folder(folder: Path) -> Path:
    """Return what an engine that serves quantised checkpoints is to open in place of a folder of the cache."""
    source = read_quantised_source(folder)
    return folder if source is None else source.path


def cache_scales(folder: Path) -> dict[str, tuple[float, ...]]:
    """Return the scales that a quantised checkpoint, or what was made of one, has for a quantised KV cache.

    Raises:
        HarnessError: as `QuantisedSource.open`.
    """
    source = read_quantised_source(folder)
    return source.open().cache_scales if source is not None else {}
