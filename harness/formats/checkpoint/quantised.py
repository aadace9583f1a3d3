"""What the core asks of a quantised checkpoint whose weights were dequantised into a folder of the cache.

The reader that made the folder answers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from harness.base import plugins
from harness.errors import some_of
from harness.formats.checkpoint.converted import read_info
from harness.formats.checkpoint.locate import Reader

_BESIDE = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside config.json that say how weights are quantised, and that are not read."""

if TYPE_CHECKING:
    import torch


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

    reader: str
    """Name of the reader that made the folder."""
    path: Path
    formats: tuple[str, ...]
    """Titles of the formats that were read."""
    modules: tuple[str, ...]
    """Modules whose weights were quantised, by HF's names."""
    made: str
    """Name of the folder, which changes when the checkpoint does."""
    contradictions: tuple[str, ...] = ()
    """Where the checkpoint contradicts itself, so that its weights may be read in several ways."""

    def open(self) -> OpenedQuantised:
        """Return the quantised checkpoint, opened once in a process.

        Raises:
            HarnessError: CHECKPOINT_CHANGED: it is not that which the folder was made of; as the reader.
        """
        reader = plugins.load(plugins.READERS, self.reader, Reader)
        if type(reader).open_source is Reader.open_source:
            plugins.refuse(plugins.READERS, self.reader, f"read {self.path} as quantised, and has no open_source")
        return reader.open_source(self)

    def __str__(self) -> str:
        """Say what was read, for the head of a verdict."""
        if not self.modules:
            return "the checkpoint is quantised in its KV cache alone: the weights are its own"
        beside = [name for name in _BESIDE if (self.path / name).is_file()]
        return (
            f"the weights are those of a quantised checkpoint, dequantised to float32: {' and '.join(self.formats)} in "
            f"{len(self.modules)} modules ({some_of(self.modules, 3)}); not judged: whether they are the original "
            f"model's{f', and what {beside[0]} says of them' if beside else ''}"
        )


def read_quantised_source(folder: Path) -> QuantisedSource | None:
    """Return what a folder was made of; None for one that was not made of a quantised checkpoint."""
    info = read_info(folder)
    try:
        return QuantisedSource(
            reader=info["reader"],
            path=Path(info["source"]),
            formats=tuple(info["formats"]),
            modules=tuple(info["modules"]),
            made=folder.name,
            contradictions=tuple(info.get("contradictions", ())),
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
