"""Says what is in a safetensors file or a checkpoint, and what a checkpoint lacks for its own config.

Only headers are read. What the config asks for is found by building HF's own module on the meta device, which takes
no memory, so that every architecture that transformers knows is covered without a table of names here.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tabulate import tabulate

from harness import checkpoint
from harness.errors import Code, HarnessError, printable
from harness.files import exists
from harness.safetensors_header import Header, TensorEntry, read_header

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_LAYERS = 4096
"""Layers of the deepest model that is built on the meta device; more is a mistake in the config."""

_SUMMARY = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "rope_parameters", "rope_scaling",
    "rope_theta", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip


def inspect_path(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe a safetensors file, or a checkpoint folder, as JSON-able tables.

    Returns:
        `kind` (`file` or `checkpoint`), `path`, `files` (headers and tensors), `totals`; for a checkpoint also
        `config` and `against_config` (`missing`, `unexpected`, `misshapen`, `tied`, or the reason why not compared).

    Raises:
        HarnessError: NOT_A_CHECKPOINT, BAD_CONFIG, MISSING_SHARD, DAMAGED_SAFETENSORS, TENSORS_CONTRADICT_CONFIG
            where index and shards disagree, UNSUPPORTED_ARCHITECTURE.
    """
    path = Path(path)
    if path.is_dir():
        return _inspect_checkpoint(path)
    if not exists(path):
        _refuse(Code.NOT_A_CHECKPOINT, "there is no such file or folder", path, hint="check the path")
    return _tables("file", path, [path])


def render_text(info: Mapping[str, Any]) -> str:
    """Return the tables of `inspect_path` for a terminal."""
    parts = [f"{info['kind']} {info['path']}"]
    if "config" in info:
        parts.append(_table(sorted(info["config"].items()), ["config", "value"]))
    parts += map(_render_file, info["files"])
    totals = info["totals"]
    rows = [(name, *numbers.values()) for name, numbers in totals["by_dtype"].items()]
    rows.append(("all", totals["num_tensors"], totals["num_parameters"], totals["num_bytes"]))
    parts.append(_table(rows, ["dtype", "tensors", "parameters", "bytes"]))
    if "against_config" in info:
        parts.append(_render_against_config(info["against_config"]))
    return printable("\n\n".join(parts))


def _inspect_checkpoint(folder: Path) -> dict[str, Any]:
    config = checkpoint.read_config(folder)
    headers = checkpoint.tensor_headers(folder)
    info = _tables("checkpoint", folder, checkpoint.shards(folder))
    info["config"] = {key: config[key] for key in _SUMMARY if key in config}
    info["against_config"] = _against_config(folder, config, {name: entry for name, (entry, _) in headers.items()})
    return info


def _tables(kind: str, path: Path, files: Iterable[Path]) -> dict[str, Any]:
    headers = [(file, read_header(file)) for file in files]
    totals = _totals([entry for _, header in headers for entry in header.tensors])
    tables = [_file_table(file, header) for file, header in headers]
    return {"schema_version": 1, "kind": kind, "path": str(path), "files": tables, "totals": totals}


def _file_table(file: Path, header: Header) -> dict[str, Any]:
    return {
        "file": file.name,
        "num_bytes": header.file_bytes,
        "header_bytes": header.header_bytes,
        "data_offset": header.data_offset,
        "metadata": header.metadata,
        "tensors": [_tensor_table(entry) for entry in header.tensors],
    }


def _tensor_table(entry: TensorEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "begin": entry.begin,
        "end": entry.end,
        "num_bytes": entry.num_bytes,
    }


def _totals(entries: list[TensorEntry]) -> dict[str, Any]:
    tensors, parameters, num_bytes = Counter[str](), Counter[str](), Counter[str]()
    for entry in entries:
        tensors[entry.dtype] += 1
        parameters[entry.dtype] += entry.num_elements
        num_bytes[entry.dtype] += entry.num_bytes
    by_dtype = {
        dtype: {"num_tensors": tensors[dtype], "num_parameters": parameters[dtype], "num_bytes": num_bytes[dtype]}
        for dtype in sorted(tensors)
    }
    return {
        "num_tensors": tensors.total(),
        "num_parameters": parameters.total(),
        "num_bytes": num_bytes.total(),
        "by_dtype": by_dtype,
    }


def _against_config(folder: Path, config: Mapping[str, Any], actual: Mapping[str, TensorEntry]) -> dict[str, Any]:
    if "quantization_config" in config:
        return {"compared": False, "reason": "the tensors are packed as quantization_config says"}
    model = _meta_model(folder, config)
    if _is_converted(model):
        return {"compared": False, "reason": "transformers renames or merges this model's tensors as it loads them"}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = _tied(model)
    misshapen = [
        {"name": name, "expected": list(expected[name]), "actual": list(entry.shape)}
        for name, entry in sorted(actual.items())
        if name in expected and entry.shape != expected[name]
    ]
    return {
        "compared": True,
        "missing": sorted(name for name in expected.keys() - actual.keys() if tied.get(name) not in actual),
        "unexpected": sorted(actual.keys() - expected.keys()),
        "misshapen": misshapen,
        "tied": sorted(tied),
    }


def _meta_model(folder: Path, config: Mapping[str, Any]) -> "PreTrainedModel":
    """Build the model that the config describes, without memory for its tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    where = folder / checkpoint.CONFIG_NAME
    kind, num_layers = config.get("model_type"), config.get("num_hidden_layers")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        what = "transformers does not know this model_type"
        _refuse(Code.UNSUPPORTED_ARCHITECTURE, what, where, kind, hint="upgrade transformers, or correct config.json")
    if CONFIG_MAPPING[kind] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        what = "transformers has no causal language model of this model_type"
        _refuse(Code.UNSUPPORTED_ARCHITECTURE, what, where, kind, hint="inspect its safetensors files one by one")
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        what = f"num_hidden_layers exceeds {MAX_LAYERS}"
        _refuse(Code.BAD_CONFIG, what, where, num_layers, hint="correct config.json")
    try:
        with torch.device("meta"):
            settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(settings, trust_remote_code=False)
    except Exception as error:  # any value of the config may be the one that transformers fails on
        what = "transformers cannot build the model that the config describes"
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        _refuse(Code.BAD_CONFIG, what, where, reason, hint="correct config.json, or download the checkpoint again")


def _is_converted(model: "PreTrainedModel") -> bool:
    """Return whether transformers loads this model from tensors of other names than its modules have."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _tied(model: "PreTrainedModel") -> dict[str, str]:
    """Return the tensors that are another one under a second name, with that name."""
    return dict(model.all_tied_weights_keys) if getattr(model.config, "tie_word_embeddings", False) else {}


def _render_file(file: Mapping[str, Any]) -> str:
    head = f"{file['file']}: {file['num_bytes']} bytes, header {file['header_bytes']}, data from {file['data_offset']}"
    metadata = [f"  {key}: {value}" for key, value in sorted(file["metadata"].items())]
    rows = [
        (tensor["name"], tensor["dtype"], tensor["shape"], tensor["begin"], tensor["end"], tensor["num_bytes"])
        for tensor in file["tensors"]
    ]
    return "\n".join([head, *metadata, _table(rows, ["tensor", "dtype", "shape", "begin", "end", "bytes"])])


def _render_against_config(found: Mapping[str, Any]) -> str:
    if not found["compared"]:
        return f"not compared with the config: {found['reason']}"
    rows = [("missing", name, "") for name in found["missing"]]
    rows += [("unexpected", name, "") for name in found["unexpected"]]
    rows += [
        ("misshapen", row["name"], f"expected {row['expected']}, actual {row['actual']}") for row in found["misshapen"]
    ]
    if not rows:
        return "the tensors are those that the config asks for"
    return _table(rows, ["against the config", "tensor", ""])


def _table(rows: Iterable[Iterable[object]], headers: list[str]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    return tabulate(cells, headers=headers, disable_numparse=True)


def _refuse(code: Code, what: str, where: object, actual: object = None, *, hint: str) -> NoReturn:
    raise HarnessError(code, what, where=where, actual=actual, hint=hint)
