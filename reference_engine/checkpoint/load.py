"""Loading a HuggingFace checkpoint strictly: what is missing, left over or misshapen is named, before anything is read.

A checkpoint is `model.safetensors`, or shards listed by `model.safetensors.index.json`. Every file is opened once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.quantised_tensors import QuantisedTensors
from reference_engine.checkpoint.weights import LM_HEAD, TOKEN_EMBEDDING, Placement, weight_table
from reference_engine.errors import CheckpointError

__all__ = ["load_weights", "read_cache_scales"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_NAMED = 8

# Old checkpoints store what is computed from the config; scales are read where the cache is quantised.
IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")
_CACHE_SCALE = re.compile(r"\.layers\.(\d+)\..*\.([kv])_(?:proj\.output_)?scale$")


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    rank: int = 0,
    num_ranks: int = 1,
) -> dict[str, torch.Tensor]:
    """Return the engine's parameters by name, in `dtype` on `device`; with several ranks, this one's parts.

    A tied head is the embedding's own tensor, unless the checkpoint holds a different `lm_head.weight`, which then
    counts, as in transformers.

    Raises:
        CheckpointError: a file or tensor is missing, left over, damaged, misshapen or of a dtype that is no float.
    """
    shards = _find_shards(Path(folder))
    with ExitStack() as stack:
        files = {path: stack.enter_context(_open(path)) for path in shards}
        source = _locate_tensors(files, shards, config.family.ignored_prefix)
        table = _table(config, source)
        scales = QuantisedTensors.of(config.quantisation, table, source, folder)
        _check_names(table, {name: file for name, file in source.items() if name not in scales.names}, folder)
        _check_tensors({name: item for name, item in table.items() if name not in scales.weights}, source, folder)
        scales.check_ranks(num_ranks)
        parameters = _read(_table(config.shard(num_ranks), source), source, dtype, device, scales, rank=rank)
        scales.read_into(parameters, device)
    if config.tie_word_embeddings:
        _tie(parameters)
    return parameters


def read_cache_scales(folder: str | Path, layers: Sequence[int]) -> tuple[tuple[float, float], ...]:
    """Return the scales of K and of V that a checkpoint has for a quantised cache, of each layer; nothing for none.

    Raises:
        CheckpointError: a layer lacks one, or has one for each head, or one that is not positive.
    """
    scales: dict[tuple[int, str], torch.Tensor] = {}
    for path in _find_shards(Path(folder)):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (a file of safetensors is no mapping)
                match = _CACHE_SCALE.search(name)
                if match:
                    scales[int(match[1]), match[2]] = file.get_tensor(name).to(torch.float32)
    if not scales:
        return ()
    wanted = [(layer, part) for layer in layers for part in "kv"]
    held = {at: scales[at].flatten()[:4].tolist() if at in scales else [] for at in wanted}
    wrong = [
        f"{part}_scale of layer {layer}: {scales}"
        for (layer, part), scales in held.items()
        if len(scales) != 1 or not 0 < scales[0] < math.inf
    ]
    if wrong:
        raise CheckpointError(
            "scales of the KV cache are missing, or none to divide by", where=folder,
            expected="one positive number for K and one for V of each layer", actual=_named(wrong, separator="; "),
        )  # fmt: skip
    return tuple((held[layer, "k"][0], held[layer, "v"][0]) for layer in layers)


def _table(config: ModelConfig, source: Mapping[str, Any]) -> dict[str, Placement]:
    table = weight_table(config)
    if config.tie_word_embeddings and LM_HEAD in source:
        table[LM_HEAD] = Placement(LM_HEAD, (config.vocab_size, config.hidden_size))
    return table


def _find_shards(folder: Path) -> dict[Path, frozenset[str] | None]:
    """Return the files to open, each with the tensors that the index promises in it (None without an index)."""
    if (folder / SINGLE_FILE).is_file():
        return {folder / SINGLE_FILE: None}
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            "no weights", where=folder, expected=f"{SINGLE_FILE} or {INDEX_FILE}", actual=_listing(folder)
        )
    promised: dict[str, set[str]] = {}
    for name, file in _read_weight_map(folder / INDEX_FILE).items():
        promised.setdefault(file, set()).add(name)
    missing = sorted(file for file in promised if not (folder / file).is_file())
    if missing:
        raise CheckpointError("shards are missing", where=folder / INDEX_FILE, actual=_named(missing))
    return {folder / file: frozenset(names) for file, names in sorted(promised.items())}


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"the index cannot be read: {error!r}", where=path) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("the index lists nothing", where=path, expected="a weight_map of tensors to shards")
    for name, file in weight_map.items():
        # A shard lies beside its index: anything else could make the loader open any file of the machine.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"the shard of {name} is no file name", where=path, actual=repr(file))
    return weight_map


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"not a safetensors file: {error}",
            where=path,
            actual=f"{path.stat().st_size} bytes",
            hint="The file may be truncated: fetch it again.",
        ) from error


def _locate_tensors(
    files: Mapping[Path, Any], shards: Mapping[Path, frozenset[str] | None], ignored_prefix: str | None
) -> dict[str, Any]:
    """Map each tensor to the open file that holds it, and hold the index to what it says."""
    source: dict[str, Any] = {}
    for path, file in files.items():
        held, promised = set(file.keys()), shards[path]
        if promised is not None and promised != held:
            raise CheckpointError(
                "index and shard disagree",
                where=path,
                expected=f"the index's tensors (absent from the shard: {_named(sorted(promised - held))})",
                actual=f"the shard's (absent from the index: {_named(sorted(held - promised))})",
            )
        source.update({name: file for name in held if not name.endswith(IGNORED_SUFFIXES)})
    if ignored_prefix is None:
        return source
    return {name: file for name, file in source.items() if not name.startswith(ignored_prefix)}


def _check_names(table: Mapping[str, Placement], source: Mapping[str, Any], folder: str | Path) -> None:
    missing, unexpected = sorted(table.keys() - source.keys()), sorted(source.keys() - table.keys())
    if missing or unexpected:
        raise CheckpointError(
            "the tensors are not those of the config",
            where=folder,
            expected=f"{len(table)} tensors (missing: {_named(missing)})",
            actual=f"{len(source)} (unexpected: {_named(unexpected)})",
            hint="Compare config.json (layers, biases, tie_word_embeddings) with the checkpoint.",
        )


def _check_tensors(table: Mapping[str, Placement], source: Mapping[str, Any], folder: str | Path) -> None:
    wrong = list(_describe_wrong(table, source))
    if wrong:
        raise CheckpointError(
            "tensors contradict config.json",
            where=folder,
            actual=_named(wrong, separator="; "),
            hint="Compare the sizes in config.json with the checkpoint.",
        )


def _describe_wrong(table: Mapping[str, Placement], source: Mapping[str, Any]) -> Iterator[str]:
    for name, placement in table.items():
        header = source[name].get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != placement.shape:
            yield f"{name}: expected shape {list(placement.shape)}, found {list(shape)}"
        if dtype not in FLOAT_DTYPES:
            yield f"{name}: expected dtype {' or '.join(FLOAT_DTYPES)}, found {dtype}"


def _read(
    table: Mapping[str, Placement],
    source: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    scales: QuantisedTensors,
    *,
    rank: int,
) -> dict[str, torch.Tensor]:
    """Copy each tensor, or the rank's part of it, to its rows, so that at most one lies in memory twice."""
    num_rows: dict[str, int] = {}
    for placement in table.values():
        num_rows[placement.parameter] = max(num_rows.get(placement.parameter, 0), placement.row + placement.shape[0])
    parameters: dict[str, torch.Tensor] = {}
    for name, placement in table.items():
        shape = (num_rows[placement.parameter], *placement.shape[1:])
        if placement.parameter not in parameters:
            kept_dtype = torch.float32 if placement.stays_float32 else scales.dtypes.get(placement.parameter, dtype)
            parameters[placement.parameter] = torch.empty(shape, dtype=kept_dtype, device=device)
        tensor = _part(source[name].get_slice(name), placement.shape, rank)
        parameters[placement.parameter][placement.row : placement.row + placement.shape[0]].copy_(tensor)
    return parameters


def _part(header: Any, shape: tuple[int, ...], rank: int) -> torch.Tensor:
    """Read the rank's part along each dimension in which a part is smaller than the whole."""
    whole = header.get_shape()
    parts = [
        slice(rank * n, (rank + 1) * n) if n < total else slice(total) for n, total in zip(shape, whole, strict=True)
    ]
    tensor: torch.Tensor = header[tuple(parts)]
    return tensor


def _tie(parameters: dict[str, torch.Tensor]) -> None:
    embedding = parameters[TOKEN_EMBEDDING]
    head = parameters.get(LM_HEAD)
    if head is None or (head.dtype == embedding.dtype and torch.equal(head, embedding)):
        parameters[LM_HEAD] = embedding


def _named(names: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(names[:MAX_NAMED])
    return f"{shown}{separator}and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else shown or "none"


def _listing(folder: Path) -> str:
    return _named(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "no such folder"
