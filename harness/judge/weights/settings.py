"""What the settings of two checkpoints differ in: the same tensors compute something else, or end elsewhere."""

import filecmp
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, read_table
from harness.formats.checkpoint.converted import read_info

_FREE = {
    CONFIG_NAME: (
        "_name_or_path",
        "architectures",
        "dtype",
        "quantization_config",
        "transformers_version",
        "use_cache",
    ),
    "generation_config.json": ("_from_model_config", "transformers_version"),
    "tokenizer.json": ("padding", "truncation", "version"),
}
"""By file: fields that say nothing of what is computed, or what the tensors themselves say."""
_SAYS_NOTHING = re.compile(r"README|LICENSE|\.git|.*\.index\.json$", re.IGNORECASE)
"""Names of files that say nothing of what is computed, or no more than the names of the tensors."""
_MOST_OF_A_TABLE = 5
"""Differences of one table that are listed: two vocabularies may differ in each token."""


def different_settings(first: Path | None, second: Path | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the settings in which the folders of two checkpoints differ, and what was not compared, in words.

    Raises:
        HarnessError: BAD_CONFIG: a file is no JSON object.
    """
    folders = [folder for folder in (first, second) if folder is not None and not read_info(folder)]
    if len(folders) < 2:
        return (), ("config and tokenizer: both weights must be folders in HuggingFace's layout",)
    there = [name for name in _FREE if all((folder / name).is_file() for folder in folders)]
    differing = [words for name in there for words in _differences(f"{name}: ", *(_table(f, name) for f in folders))]
    return tuple(differing), tuple(_not_compared(folders, there))


def _not_compared(folders: Sequence[Path], compared: Collection[str]) -> Iterator[str]:
    """Say of each other file (templates, code, more weights) that one folder lacks it or that its bytes differ."""
    weights = {shard.name for folder in folders for shard in Checkpoint(folder).shards}
    names = {file.name for folder in folders for file in folder.iterdir() if file.is_file()}
    for name in sorted((names | _FREE.keys()) - {*compared, *weights}):
        if _SAYS_NOTHING.match(name):
            continue
        files = [folder / name for folder in folders]
        if not all(file.is_file() for file in files):
            yield f"{name}: not both folders have one"
        elif not filecmp.cmp(files[0], files[1], shallow=False):
            yield f"{name}: its bytes differ"


def _table(folder: Path, name: str) -> Mapping[str, Any]:
    """Return what a file says; of a config with HF's defaults, where transformers knows the family."""
    table, _ = read_table(folder / name)
    if name == CONFIG_NAME:
        from transformers import AutoConfig

        with suppress(Exception):  # transformers raises ValueError, KeyError, ...
            table = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    return {field: value for field, value in table.items() if field not in _FREE[name]}


def _differences(where: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(first.keys() | second.keys()):
        left, right, place = first.get(name), second.get(name), f"{where}{name}"
        if isinstance(left, dict) and isinstance(right, dict):
            within = list(_differences(f"{place}.", left, right))
            yield from within[:_MOST_OF_A_TABLE]
            yield from [f"{place}: and {len(within) - _MOST_OF_A_TABLE} more"] if within[_MOST_OF_A_TABLE:] else ()
        elif left != right and not _are_near(left, right):
            yield f"{place} is {str(left)[:80]} in the first, {str(right)[:80]} in the second"


def _are_near(left: Any, right: Any) -> bool:
    """Whether two values are floats that are one number, written with fewer digits."""
    return isinstance(left, float) and isinstance(right, float) and math.isclose(left, right, rel_tol=1e-6)
