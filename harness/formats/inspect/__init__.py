"""Says what is in a file or folder of tensors, and what a checkpoint lacks for its own config."""

import os
from pathlib import Path
from typing import Any

from harness.base.files import exists
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.against_config import against_config
from harness.formats.checkpoint.readers import reader_of
from harness.formats.checkpoint.shards import INDEX_NAME
from harness.formats.inspect.recordings import recording_tables, tensor_tables
from harness.formats.inspect.sources import at_hand
from harness.formats.inspect.tables import file_tables
from harness.formats.inspect.text import render_text
from harness.formats.recording.format import MANIFEST_NAME
from harness.formats.safetensors_header import read_header
from harness.formats.tensors.folder import SUFFIXES

__all__ = ["inspect_path", "render_text"]

_SUMMARY = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "rope_parameters", "rope_scaling",
    "rope_theta", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip


def inspect_path(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe what holds tensors, as JSON-able tables.

    The path is a safetensors file, a GGUF file with its shards, a checkpoint's folder or embedded name, a recording, a
    golden, or a folder of dumped tensors.

    Returns:
        `kind` (`file`, `gguf`, `checkpoint`, `recording`, `golden` or `tensors`) and `path`. Of files and checkpoints
        `files` (headers and tensors) and `totals`; of a checkpoint and a GGUF file also `config` and `against_config`
        (`missing`, `unexpected`, `misshapen`, `tied`, or the reason why not compared). Of recordings `summary`,
        `requests`, `steps` by phase and `taps`; of dumps `tensors` and `left_out`.

    Raises:
        HarnessError: NOT_A_CHECKPOINT, BAD_CONFIG, MISSING_SHARD, DAMAGED_SAFETENSORS, TENSORS_CONTRADICT_CONFIG
            where index and shards disagree, UNSUPPORTED_ARCHITECTURE; as the reader of what lies at `path`.
    """
    path = at_hand(Path(path))
    if (path / MANIFEST_NAME).is_file():
        return recording_tables(path)
    if path.is_dir():
        return tensor_tables(path) if _is_dump(path) else _inspect_checkpoint(Checkpoint(path))
    if not exists(path):
        what = "there is no such file or folder"
        raise HarnessError(Code.NOT_A_CHECKPOINT, what, where=path, hint="check the path")
    reader = reader_of(path)
    described = None if reader is None else reader.describe(path)
    if described is not None:
        return described
    return file_tables("file", path, {path: read_header(path)})


def _is_dump(folder: Path) -> bool:
    """Whether a folder holds tensors, and nowhere what only a checkpoint or a recording has."""
    inside = list(folder.rglob("*"))
    others = {CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, "model.safetensors"} & {path.name for path in inside}
    return not others and any(path.suffix.lower() in SUFFIXES for path in inside)


def _inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    config, tensors = checkpoint.config, checkpoint.tensors
    info = file_tables("checkpoint", checkpoint.folder, checkpoint.headers)
    info["config"] = {key: config[key] for key in _SUMMARY if key in config}
    against = against_config(checkpoint.folder, config, {name: entry for name, (entry, _) in tensors.items()})
    return info | {"against_config": against}
