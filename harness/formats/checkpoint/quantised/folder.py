"""A quantised checkpoint as a checkpoint folder of the cache, with the weights dequantised to float32.

As with a GGUF file (`harness.formats.checkpoint.gguf.folder`), all that reads checkpoints then reads this one: oracle,
goldens, hashes, engines. `quantised.json` in it says where the weights come from; an engine that serves the quantised
checkpoint itself, and the judge, which knows its declared arithmetic, find it there.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.dequantised import (
    QUANTISED_INFO,
    folder_name,
    made_once,
    read_info,
    write_settings,
    write_shards,
)

if TYPE_CHECKING:
    from harness.formats.checkpoint.quantised.checkpoint import QuantisedCheckpoint

VERSION = 1
"""Part of a folder's name: raise it with every change of what is written."""


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

    def open(self) -> "QuantisedCheckpoint":
        """Return the quantised checkpoint, opened once in a process.

        Raises:
            HarnessError: CHECKPOINT_CHANGED: it is not that which the folder was made of; as `QuantisedCheckpoint`.
        """
        if not self.path.is_dir() or _identity(self.path) != self.made:
            raise HarnessError(
                Code.CHECKPOINT_CHANGED,
                "the quantised checkpoint was changed since its weights were dequantised",
                where=self.path,
                hint="run it again when nothing writes to the folder",
            )
        return _opened(self.path, self.made)

    def __str__(self) -> str:
        """Say what was read, for the head of a verdict."""
        if not self.modules:
            return "the checkpoint is quantised in its KV cache alone: the weights are its own"
        named = ", ".join(self.modules[:3]) + (f" and {len(self.modules) - 3} more" if len(self.modules) > 3 else "")
        return (
            f"the weights are those of a quantised checkpoint, dequantised to float32: {' and '.join(self.formats)} in "
            f"{len(self.modules)} modules ({named})"
        )


@lru_cache(maxsize=4)
def _opened(path: Path, _made: str) -> "QuantisedCheckpoint":
    from harness.formats.checkpoint.quantised.checkpoint import QuantisedCheckpoint

    return QuantisedCheckpoint(path)


def read_quantised_source(folder: Path) -> QuantisedSource | None:
    """Return what a folder was made of; None for one that was not made of a quantised checkpoint."""
    info = read_info(folder, QUANTISED_INFO)
    try:
        return QuantisedSource(
            path=Path(info["source"]), formats=tuple(info["formats"]), modules=tuple(info["modules"]), made=folder.name
        )
    except (KeyError, TypeError):
        return None


def is_quantised(folder: Path) -> bool:
    """Whether a folder holds a quantised checkpoint; raises HarnessError (BAD_CONFIG) as `Checkpoint.config`."""
    return bool(Checkpoint(folder).config.get("quantization_config"))


def checkpoint_of_quantised(folder: Path, cache: Path) -> Path:
    """Return the folder with a checkpoint's weights dequantised, made first where the cache does not have it.

    `cache` keeps such folders.

    Raises:
        HarnessError: as `QuantisedCheckpoint`; BAD_SCALE, TOO_LARGE_TO_DEQUANTISE, TENSORS_CONTRADICT_CONFIG,
            CANNOT_WRITE.
    """
    return made_once(cache / _identity(folder), QUANTISED_INFO, lambda made: _write(folder, made))


def served_folder(folder: Path) -> Path:
    """Return what an engine that serves quantised checkpoints is to open in place of a folder of the cache."""
    source = read_quantised_source(folder)
    return folder if source is None else source.path


def cache_scales(folder: Path) -> dict[str, tuple[float, ...]]:
    """Return the scales that a quantised checkpoint, or what was made of one, has for a quantised KV cache.

    Raises:
        HarnessError: as `QuantisedCheckpoint.cache_scales`.
    """
    source = read_quantised_source(folder)
    return source.open().cache_scales if source is not None else {}


def _identity(folder: Path) -> str:
    return folder_name(VERSION, folder.iterdir())


def _write(folder: Path, made: Path) -> dict[str, Any]:
    from harness.formats.checkpoint.quantised.checkpoint import QuantisedCheckpoint, check_disk

    source = QuantisedCheckpoint(folder)
    config = {name: value for name, value in source.checkpoint.config.items() if name != "quantization_config"}
    write_settings(made, config, folder)
    _check_shapes(source, made, config)
    source.check_room()
    check_disk(source, made)
    write_shards(made, source.tensors())
    return {
        "source": str(folder.resolve()),
        "formats": source.formats,
        "modules": [weight.module for weight in source.weights.values()],
    }


def _check_shapes(source: "QuantisedCheckpoint", made: Path, config: dict[str, Any]) -> None:
    """Refuse weights of another shape than HF's architecture has, by the headers alone."""
    from harness.formats.checkpoint.quantised.scheme import misfit
    from harness.formats.inspect.config import against_config

    against = against_config(made, config, source.entries)
    for wrong in against.get("misshapen", ()):
        misfit(
            "the dequantised weight has another shape than the model's",
            f"{source.checkpoint.folder}: {wrong['name']}",
            expected=wrong["expected"],
            actual=wrong["actual"],
        )
