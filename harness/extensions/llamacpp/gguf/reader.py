"""GGUF files as the core reads them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.extensions.llamacpp.gguf.model import is_gguf
from harness.formats.checkpoint.cache import cache_dir
from harness.formats.checkpoint.checkpoint import Checkpoint
from harness.formats.checkpoint.locate import Reader

if TYPE_CHECKING:
    import torch


class GGUFReader(Reader):
    """Reads a GGUF file, or several shards by one of them."""

    takes_origin = True

    def reads(self, path: Path) -> bool:
        """See `Reader.reads`."""
        return is_gguf(path)

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """See `Reader.convert`; raises HarnessError as `checkpoint_of_gguf`."""
        from harness.extensions.llamacpp.gguf.folder import checkpoint_of_gguf

        return checkpoint_of_gguf(path, cache_dir() / "gguf", hf=origin)

    def describe(self, path: Path) -> dict[str, Any]:
        """See `Reader.describe`; raises HarnessError as `inspect_gguf`."""
        from harness.extensions.llamacpp.gguf.inspect import inspect_gguf

        return inspect_gguf(path)

    def tensors(self, path: Path) -> "Mapping[str, Callable[[], torch.Tensor]]":
        """See `Reader.tensors`; raises HarnessError as `open_gguf`."""
        from harness.extensions.llamacpp.gguf.model import open_gguf
        from harness.extensions.llamacpp.gguf.weights import read_tensor

        return {name: partial(read_tensor, *place) for name, place in open_gguf(path).tensors.items()}


READER = GGUFReader()
