"""Says what is in a safetensors or GGUF file or a checkpoint, and what a checkpoint lacks for its own config."""

import os
from pathlib import Path
from typing import Any

from harness.base.files import exists
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.gguf import is_gguf
from harness.formats.inspect.config import against_config
from harness.formats.inspect.gguf import inspect_gguf
from harness.formats.inspect.tables import file_tables
from harness.formats.inspect.text import render_text
from harness.formats.safetensors_header import read_header

__all__ = ["inspect_path", "render_text"]

_SUMMARY = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "rope_parameters", "rope_scaling",
    "rope_theta", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip


def inspect_path(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a safetensors file, a GGUF file with its shards, or a checkpoint folder, as JSON-able tables.

    Returns:
        `kind` (`file`, `gguf` or `checkpoint`), `path`, `files` (headers and tensors), `totals`; for a checkpoint and a
        GGUF file also `config` and `against_config` (`missing`, `unexpected`, `misshapen`, `tied`, or the reason why
        not compared).

    Raises:
        HarnessError: NOT_A_CHECKPOINT, BAD_CONFIG, MISSING_SHARD, DAMAGED_SAFETENSORS, TENSORS_CONTRADICT_CONFIG
            where index and shards disagree, UNSUPPORTED_ARCHITECTURE.
    """
    path = Path(path)
    if path.is_dir():
        return _inspect_checkpoint(Checkpoint(path))
    if not exists(path):
        what = "there is no such file or folder"
        raise HarnessError(Code.NOT_A_CHECKPOINT, what, where=path, hint="check the path")
    if is_gguf(path):
        return inspect_gguf(path)
    return file_tables("file", path, {path: read_header(path)})


def _inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    config, tensors = checkpoint.config, checkpoint.tensors
    info = file_tables("checkpoint", checkpoint.folder, checkpoint.headers)
    info["config"] = {key: config[key] for key in _SUMMARY if key in config}
    against = against_config(checkpoint.folder, config, {name: entry for name, (entry, _) in tensors.items()})
    return info | {"against_config": against}
