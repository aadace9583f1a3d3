"""What is in a file or folder of tensors, and what a checkpoint lacks for its own config, as tables and as text.

Of safetensors files only headers are read, and neither torch nor transformers is imported for them.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from harness.base.files import exists
from harness.errors import Code, HarnessError, printable
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint, cache_dir
from harness.formats.checkpoint.against_config import against_config
from harness.formats.checkpoint.bound import cache_tables
from harness.formats.checkpoint.checkpoint import INDEX_NAME, WEIGHTS_NAME, read_table
from harness.formats.checkpoint.locate import at_hand, reader_of
from harness.formats.recording.format import MANIFEST_NAME
from harness.formats.safetensors_header import Header, TensorEntry, read_header
from harness.formats.taps import prefix_of

if TYPE_CHECKING:
    from harness.formats.recording.manifest import Manifest

__all__ = ["inspect_path", "render_text"]

_SUMMARY = (
    "architectures", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings", "rope_parameters", "rope_scaling",
    "rope_theta", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config",
)  # fmt: skip

_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def inspect_path(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Describe what holds tensors, as JSON-able tables.

    The path is a safetensors file, a GGUF file with its shards, a checkpoint's folder or embedded name, a recording, a
    golden, or a folder of dumped tensors.

    Returns:
        `kind` (`file`, `gguf`, `checkpoint`, `recording`, `golden`, `tensors` or `cache`) and `path`. Of files and
        checkpoints `files` (headers and tensors) and `totals`; of a checkpoint and a GGUF file also `config` and
        `against_config` (`missing`, `unexpected`, `misshapen`, `tied`, or the reason why not compared), and of a
        checkpoint the sampling defaults of `generation_config`, if it has some. Of recordings `summary`, `requests`,
        `steps` by phase and `taps`; of dumps `tensors` and `left_out`; of the harness's cache `summary` and `parts`.

    Raises:
        HarnessError: NOT_A_CHECKPOINT, BAD_CONFIG, MISSING_SHARD, DAMAGED_SAFETENSORS, TENSORS_CONTRADICT_CONFIG
            where index and shards disagree, UNSUPPORTED_ARCHITECTURE; as the reader of what lies at `path`.
    """
    path = at_hand(Path(path))
    if path.is_dir() and os.path.realpath(path) == os.path.realpath(cache_dir()):
        return cache_tables(path)
    if (path / MANIFEST_NAME).is_file():
        return recording_tables(path)
    if path.is_dir():
        return tensor_tables(path) if is_dump(path) else _inspect_checkpoint(Checkpoint(path))
    if not exists(path):
        what = "there is no such file or folder"
        raise HarnessError(Code.NOT_A_CHECKPOINT, what, where=path, hint="check the path")
    reader = reader_of(path)
    described = None if reader is None else reader.describe(path)
    if described is not None:
        return described
    return file_tables("file", path, {path: read_header(path)})


def is_dump(folder: Path) -> bool:
    """Whether a folder holds tensors, and nowhere what only a checkpoint or a recording has."""
    inside = list(folder.rglob("*"))
    if {CONFIG_NAME, INDEX_NAME, MANIFEST_NAME, WEIGHTS_NAME} & {path.name for path in inside}:
        return False
    from harness.formats.tensors import SUFFIXES

    return any(path.suffix.lower() in SUFFIXES for path in inside)


def _inspect_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    config, tensors = checkpoint.config, checkpoint.tensors
    info = file_tables("checkpoint", checkpoint.folder, checkpoint.headers)
    info["config"] = {key: config[key] for key in _SUMMARY if key in config}
    path = checkpoint.folder / "generation_config.json"
    generation = read_table(path)[0] if path.is_file() else {}
    if sampling := {key: generation[key] for key in _SAMPLING if generation.get(key) is not None}:
        info["generation_config"] = sampling
    against = against_config(checkpoint.folder, config, {name: entry for name, (entry, _) in tensors.items()})
    return info | {"against_config": against}


def file_tables(kind: str, path: Path, headers: Mapping[Path, Header]) -> dict[str, Any]:
    """Describe safetensors files and what is in them."""
    total = totals([entry for header in headers.values() for entry in header.tensors])
    tables = [_file_table(file, header) for file, header in headers.items()]
    return {"schema_version": 1, "kind": kind, "path": str(path), "files": tables, "totals": total}


def _file_table(file: Path, header: Header) -> dict[str, Any]:
    return {
        "file": file.name,
        "num_bytes": header.file_bytes,
        "header_bytes": header.header_bytes,
        "data_offset": header.data_offset,
        "metadata": header.metadata,
        "tensors": [tensor_table(entry) for entry in header.tensors],
    }


def tensor_table(entry: TensorEntry) -> dict[str, Any]:
    """Describe one tensor."""
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "begin": entry.begin,
        "end": entry.end,
        "num_bytes": entry.num_bytes,
    }


def totals(entries: list[TensorEntry]) -> dict[str, Any]:
    """Count tensors, elements and bytes, in total and by dtype."""
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


def recording_tables(path: Path) -> dict[str, Any]:
    """Describe a recording or golden; the tensors are not read, nor their digests checked.

    Raises:
        HarnessError: as `Recording.open`, and for a step file that is missing or damaged.
    """
    from harness.formats.recording import Recording

    with Recording.open(path, verify=False) as recording:
        manifest, steps = recording.manifest, recording.steps
        return {
            "schema_version": 1,
            "kind": "golden" if manifest.producer.name == "harness.oracle" else "recording",
            "path": str(path),
            "summary": _recording_summary(manifest) | {"num_bytes": sum(step.entry.num_bytes for step in steps)},
            "requests": [
                {
                    "id": request.id,
                    "prompt_length": request.prompt_length,
                    "num_tokens": len(request.token_ids),
                    "draft_of": request.draft_of,
                }
                for request in manifest.requests
            ],
            "steps": [
                {"phase": phase, "num_steps": len(entries), "num_rows": sum(entry.num_rows for entry in entries)}
                for phase in dict.fromkeys(step.phase for step in steps)
                if (entries := [step.entry for step in steps if step.phase == phase])
            ],
            "taps": [
                {
                    "name": tap.name,
                    "dtype": tap.dtype,
                    "shape": list(tap.shape),
                    "num_rows": sum(step.num_rows_of(tap.name) for step in steps if step.has(tap.name)),
                }
                for tap in manifest.taps
            ],
        }


def _recording_summary(manifest: "Manifest") -> dict[str, Any]:
    return {
        "producer": f"{manifest.producer.name} {manifest.producer.version}",
        "model": manifest.model.id,
        "dtype": manifest.dtype,
        "device": manifest.device,
        "schedule": manifest.schedule,
        "rank": manifest.rank,
        "world_size": manifest.world_size,
    }


def tensor_tables(path: Path) -> dict[str, Any]:
    """Describe a folder of dumped tensors.

    Raises:
        HarnessError: as `read_tensors`.
    """
    from harness.formats.tensors import read_tensors

    dump = read_tensors(path)
    tensors = [
        {
            "name": tensor.name,
            "dtype": str(tensor.tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.tensor.shape),
        }
        for tensor in dump.tensors
    ]
    return {
        "schema_version": 1,
        "kind": "tensors",
        "path": str(path),
        "tensors": tensors,
        "left_out": list(dump.left_out),
    }


def render_text(info: Mapping[str, Any]) -> str:
    """Return the tables of `inspect_path` for a terminal."""
    parts = [f"{info['kind']} {info['path']}"]
    tables = [name for name in ("config", "generation_config", "summary") if name in info]
    parts += [_table(sorted(info[name].items()), [name, "value"]) for name in tables]
    parts += [_rows(info[name]) for name in ("requests", "steps", "parts") if name in info]
    parts += [_render_tokens(info)] if info.get("tokens") else []
    parts += [_rows([_shown_tap(tap) for tap in info["taps"]])] if "taps" in info else []
    parts += [_rows(info["tensors"])] if "tensors" in info else []
    parts += [f"left out: {item}" for item in info.get("left_out", ())]
    parts += map(_render_file, info.get("files", ()))
    if "totals" in info:
        parts += _render_totals(info["totals"])
    if "against_config" in info:
        parts.append(_render_against_config(info["against_config"]))
    return printable("\n\n".join(parts), keeps_lines=True)


def _render_tokens(info: Mapping[str, Any]) -> str:
    """Return a line for each token, with the likeliest next ones where there are logits."""
    rows = [
        (token["request"], token["position"], token["id"], _piece(token), *_next_tokens(token))
        for token in info["tokens"]
    ]
    headers = ["request", "position", "id", "piece", "likeliest next tokens, log probability", "of the next token"]
    left = info["num_tokens_left_out"]
    return _table(rows, headers) + (f"\nand {left:,} more tokens" if left else "")


def _next_tokens(token: Mapping[str, Any]) -> tuple[str, str]:
    best = ", ".join(f"{_piece(item)} {item['log_prob']:.3g}" for item in token.get("likeliest", ()))
    log_prob = token.get("log_prob")
    return best, "" if log_prob is None else f"{log_prob:.3g}"


def _piece(token: Mapping[str, Any]) -> str:
    """Return a token's piece, quoted as Python does; its id without a tokenizer."""
    return str(token["id"]) if token["piece"] is None else repr(token["piece"])


def _shown_tap(tap: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tap with its inputs as a text, those of its layer by their site."""
    inputs = (name.removeprefix(prefix_of(tap["name"])) for name in tap.get("inputs", ()))
    return {**tap, "inputs": ", ".join(inputs)} if "inputs" in tap else dict(tap)


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table whose columns are the keys of its rows."""
    cells = [["" if cell is None else cell for cell in row.values()] for row in rows]
    return _table(cells, [name.removeprefix("num_").replace("_", " ") for name in rows[0]]) if rows else ""


def _render_totals(totals: Mapping[str, Any]) -> Iterator[str]:
    rows = [(name, *numbers.values()) for name, numbers in totals["by_dtype"].items()]
    rows.append(("all", totals["num_tensors"], totals["num_parameters"], totals["num_bytes"]))
    yield _table(rows, ["dtype", "tensors", "parameters", "bytes"])
    if "bits_per_weight" in totals:
        yield f"{totals['bits_per_weight']:.2f} bits per weight"


def _render_file(file: Mapping[str, Any]) -> str:
    head = f"{file['file']}: {file['num_bytes']} bytes, header {file['header_bytes']}, data from {file['data_offset']}"
    metadata = [f"  {key}: {value}" for key, value in sorted(file["metadata"].items())]
    rows = [
        (tensor["name"], tensor["dtype"], tensor["shape"], tensor["begin"], tensor["end"], tensor["num_bytes"])
        for tensor in file["tensors"]
    ]
    return "\n".join([head, *metadata, _table(rows, ["tensor", "dtype", "shape", "begin", "end", "bytes"])])


def _render_against_config(comparison: Mapping[str, Any]) -> str:
    if not comparison["compared"]:
        return f"not compared with the config: {comparison['reason']}"
    rows = [("missing", name, "") for name in comparison["missing"]]
    rows += [("unexpected", name, "") for name in comparison["unexpected"]]
    rows += [
        ("misshapen", row["name"], f"expected {row['expected']}, actual {row['actual']}")
        for row in comparison["misshapen"]
    ]
    if not rows:
        return "the tensors are those that the config asks for"
    return _table(rows, ["against the config", "tensor", ""])


def _table(rows: Iterable[Iterable[object]], headers: list[str]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    return tabulate(cells, headers=headers, disable_numparse=True)
