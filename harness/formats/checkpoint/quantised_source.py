"""What a folder of the cache says of the quantised checkpoint that its weights were dequantised from.

The extension that reads quantised checkpoints writes such folders; the core runs on them, and asks it for what the
checkpoint declares besides its weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from harness.base import plugins
from harness.formats.checkpoint.converted import QUANTISED_INFO, read_info

if TYPE_CHECKING:
    import torch

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

    def rounded_inputs(self, module: str, x: "torch.Tensor", dtype: "torch.dtype") -> "Iterator[torch.Tensor]":
        """Yield inputs [R, I] of a module's product, float64, in each way to quantise them that the checkpoint allows.

        The likeliest way is first; none for a product whose inputs stay as they are. `dtype` is the engine's.
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
