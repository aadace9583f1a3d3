"""A quantised checkpoint as a checkpoint folder of the cache, with the weights dequantised to float32.

As with a GGUF file (`harness.extensions.llamacpp.gguf.folder`), all that reads checkpoints then reads this one: oracle,
goldens, hashes, engines. `made_from.json` in it says where the weights come from; an engine that serves the quantised
checkpoint itself, and the judge, which knows its declared arithmetic, find it there.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.quantised.checkpoint import QuantisedCheckpoint, check_disk
from harness.extensions.quantised.config import misfit
from harness.formats.checkpoint.against_config import against_config
from harness.formats.checkpoint.cache import cache_dir
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.converted import folder_name, made_once, write_settings, write_shards
from harness.formats.checkpoint.locate import Reader
from harness.formats.checkpoint.quantised import QuantisedSource

NAME = "quantised"
"""The reader's name among the entry points."""
VERSION = 3
"""Part of a folder's name: raise it with every change of what is written."""


def open_source(source: QuantisedSource) -> QuantisedCheckpoint:
    """Return the quantised checkpoint that a folder was made of, opened once in a process.

    Raises:
        HarnessError: CHECKPOINT_CHANGED: it is not that which the folder was made of; as `QuantisedCheckpoint`.
    """
    if not source.path.is_dir() or _identity(source.path) != source.made:
        raise HarnessError(
            Code.CHECKPOINT_CHANGED,
            "the quantised checkpoint was changed since its weights were dequantised",
            where=source.path,
            hint="run it again when nothing writes to the folder",
        )
    return _opened(source.path, source.made)


@lru_cache(maxsize=4)
def _opened(path: Path, _made: str) -> QuantisedCheckpoint:
    return QuantisedCheckpoint(path)


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
    return made_once(cache / _identity(folder), NAME, lambda made: _write(folder, made))


def _identity(folder: Path) -> str:
    return folder_name(VERSION, folder.iterdir())


def _write(folder: Path, made: Path) -> dict[str, Any]:
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
        "contradictions": source.contradictions(),
    }


def _check_shapes(source: QuantisedCheckpoint, made: Path, config: dict[str, Any]) -> None:
    """Refuse weights of another shape than HF's architecture has, by the headers alone."""
    against = against_config(made, config, source.entries)
    for wrong in against.get("misshapen", ()):
        misfit(
            "the dequantised weight has another shape than the model's",
            f"{source.checkpoint.folder}: {wrong['name']}",
            expected=wrong["expected"],
            actual=wrong["actual"],
        )


class QuantisedReader(Reader):
    """Reads a checkpoint whose config has a `quantization_config`."""

    def reads(self, path: Path) -> bool:
        """See `Reader.reads`; raises HarnessError (BAD_CONFIG) as `Checkpoint.config`."""
        return (path / CONFIG_NAME).is_file() and is_quantised(path)

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """See `Reader.convert`; raises HarnessError as `checkpoint_of_quantised`."""
        return checkpoint_of_quantised(path, cache_dir() / "dequantised")

    def open_source(self, source: QuantisedSource) -> QuantisedCheckpoint:
        """See `Reader.open_source`; raises HarnessError as `folder.open_source`."""
        return open_source(source)


READER = QuantisedReader()
