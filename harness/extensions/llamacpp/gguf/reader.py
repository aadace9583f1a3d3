"""GGUF files as the core reads them, and their contents as `harness inspect` shows them."""

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

import json

from harness.base.files import scratch_folder
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf import GGUFHeader, GGUFModel, GGUFTensor, open_gguf
from harness.extensions.llamacpp.gguf.architecture import ROPE_FACTORS, hf_name
from harness.extensions.llamacpp.gguf.folder import gguf_config
from harness.formats.checkpoint.against_config import against_config
from harness.formats.inspect import tensor_table, totals
from harness.formats.safetensors_header import TensorEntry


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
        return inspect_gguf(path)

    def tensors(self, path: Path) -> "Mapping[str, Callable[[], torch.Tensor]]":
        """See `Reader.tensors`; raises HarnessError as `open_gguf`."""
        from harness.extensions.llamacpp.gguf.model import open_gguf, read_tensor

        return {name: partial(read_tensor, *place) for name, place in open_gguf(path).tensors.items()}


READER = GGUFReader()


_LONGEST_SHOWN = 8


def inspect_gguf(path: Path) -> dict[str, Any]:
    """Describe a GGUF file and the shards beside it; see `inspect_path`.

    Raises:
        HarnessError: DAMAGED_GGUF, UNSUPPORTED_GGUF, MISSING_SHARD.
    """
    model = open_gguf(path)
    config, against = _against_architecture(model)
    entries = [_entry(tensor, 0) for tensor, _ in model.tensors.values()]
    return {
        "schema_version": 1,
        "kind": "gguf",
        "path": str(path),
        "files": [_file_table(header) for header in model.headers],
        "totals": {**totals(entries), "bits_per_weight": round(model.bits_per_weight, 4)},
        "config": config,
        "against_config": against,
    }


def _against_architecture(model: GGUFModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return HF's configuration of the model, and what its tensors lack for it; or why that is not known."""
    try:
        config = gguf_config(model)
        with scratch_folder("harness-") as folder:
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            return config, against_config(folder, config, _by_hf_name(model))
    except HarnessError as error:
        if error.code in (Code.DAMAGED_GGUF, Code.BAD_CONFIG):
            raise
        return {}, {"compared": False, "reason": error.what}


def _by_hf_name(model: GGUFModel) -> dict[str, TensorEntry]:
    """Return the tensors by HF's names; one that HF has no place for under its own."""
    return {
        hf_name(name) or name: _entry(tensor, 0) for name, (tensor, _) in model.tensors.items() if name != ROPE_FACTORS
    }


def _entry(tensor: GGUFTensor, offset: int) -> TensorEntry:
    begin, end = tensor.begin - offset, tensor.end - offset
    return TensorEntry(name=tensor.name, dtype=tensor.type.name, shape=tensor.shape, begin=begin, end=end)


def _file_table(header: GGUFHeader) -> dict[str, Any]:
    return {
        "file": header.path.name,
        "num_bytes": header.file_bytes,
        "header_bytes": header.data_offset,
        "data_offset": header.data_offset,
        "version": header.version,
        "metadata": {key: _shown(value) for key, value in header.metadata.items()},
        "tensors": [
            {
                **tensor_table(_entry(tensor, header.data_offset)),
                "bits_per_weight": tensor.type.bits_per_weight,
            }
            for tensor in header.tensors
        ],
    }


def _shown(value: Any) -> Any:
    """Return a value of the metadata; of a long list its begin and its length."""
    if not isinstance(value, list) or len(value) <= _LONGEST_SHOWN:
        return value
    return f"{value[:_LONGEST_SHOWN]!r} and {len(value) - _LONGEST_SHOWN} more"
