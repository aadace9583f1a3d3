"""Readers of checkpoints that are not in HuggingFace's layout, which extensions and other packages bring."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base import plugins
from harness.formats.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


class Reader:
    """A reader; an entry point of the group `inference_harness.readers` names an instance."""

    takes_origin = False
    """Whether `--hf` can name the checkpoint in HuggingFace's layout that such a one was made from."""

    def reads(self, path: Path) -> bool:
        """Return whether a file or folder is a checkpoint of this kind."""
        raise NotImplementedError

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """Return a folder in HuggingFace's layout with the same weights, made first where the cache lacks it.

        `origin` is what `--hf` names.
        """
        raise NotImplementedError

    def describe(self, path: Path) -> dict[str, Any] | None:
        """Return what `harness inspect` shows of a file; None where its own tables of HuggingFace's layout do."""
        return None

    def tensors(self, path: Path) -> "Mapping[str, Callable[[], torch.Tensor]] | None":
        """Return how each tensor of a file is read, by its name; None where safetensors files hold them."""
        return None


def reader_of(path: Path) -> Reader | None:
    """Return the reader of a path; None for HuggingFace's layout, and for what nobody reads.

    Raises:
        HarnessError: EXTENSION_FAILED.
    """
    readers: list[Reader] = plugins.load_all(plugins.READERS)
    return next((reader for reader in readers if reader.reads(path)), None)
