"""Names that a user gives: which tensor is which tap, whatever the content of the tensors says."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import NoReturn

from harness.base.files import read_text
from harness.engines.by_content.columns import Columns, Table
from harness.errors import Code, HarnessError
from harness.formats.taps import Graph, Operation

_COLUMNS = re.compile(r"(?P<name>.*), columns (?P<first>\d+) to (?P<last>\d+)", re.DOTALL)
_LAYER = "*"
"""Stands for the number of a layer."""


def read_names(path: Path) -> dict[str, str]:
    """Read a JSON object of names of tensors and of the taps that they are.

    Raises:
        HarnessError: BAD_OPTION.
    """
    try:
        names = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(Code.BAD_OPTION, f"the names cannot be read: {error}", where=path) from error
    if not isinstance(names, dict) or not all(isinstance(tap, str) for tap in names.values()):
        expected = '{"blk.*.attn_out": "model.layers.*.self_attn.o_proj"}'
        raise HarnessError(Code.BAD_OPTION, "the file holds no names", where=path, expected=expected)
    return names


def named_columns(
    names: Mapping[str, str], graph: Graph, tables: Sequence[Table], labels: Sequence[str]
) -> dict[str, tuple[int, Columns]]:
    """Return by tap the table that has its name, and the columns.

    Args:
        names: of tensors, with `, columns 0 to 63` for a part of one, and the taps that they are. `*` stands for the
            number of each layer, on both sides.
        graph: of the model.
        tables: tensors with a row for each token.
        labels: the names of the tables for users; a part of one is a name, too, if no other one has it.

    Raises:
        HarnessError: BAD_OPTION: there is no such tap or tensor, there are several, or it has fewer columns.
    """
    return {
        operation.tap: _table(name, operation, tables, labels)
        for pattern, tap in names.items()
        for name, operation in _of_layers(pattern, tap, graph)
    }


def _of_layers(pattern: str, tap: str, graph: Graph) -> Iterator[tuple[str, Operation]]:
    layers = [str(layer) for layer in graph.layers] if _LAYER in tap else [""]
    pairs = [(pattern.replace(_LAYER, layer), graph.canonical(tap.replace(_LAYER, layer))) for layer in layers]
    there = [(name, graph[of_layer]) for name, of_layer in pairs if of_layer in graph]
    if not there:
        _refuse("HF's model has no such tap", tap, get_close_matches(tap, graph.by_tap, n=3, cutoff=0.3))
    yield from there


def _table(name: str, operation: Operation, tables: Sequence[Table], labels: Sequence[str]) -> tuple[int, Columns]:
    part, width = _COLUMNS.fullmatch(name), prod(operation.shape)
    name = part["name"] if part else name
    columns = Columns(start=int(part["first"]), stop=int(part["last"]) + 1) if part else Columns(start=0, stop=width)
    in_words = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    matching = [label for label in dict.fromkeys(labels) if label == name] or [
        label for label in dict.fromkeys(labels) if in_words.search(label)
    ]
    if len(matching) != 1:
        what = "several tensors have this name" if matching else "no tensor with a row for each token has this name"
        _refuse(what, name, matching[:3] or get_close_matches(name, labels, n=3, cutoff=0.3))
    rooms = {at: tables[at].rows.shape[1] for at, label in enumerate(labels) if label == matching[0]}
    fitting = [at for at, room in rooms.items() if room >= columns.stop and (part or room == width)]
    if not fitting or columns.stop - columns.start != width:
        _refuse(f"the tensor of {operation.tap} has other columns", name, [str(width)])
    return fitting[0], columns


def _refuse(what: str, actual: str, expected: Sequence[str]) -> NoReturn:
    hint = 'name tensors as the report\'s sources do: {"blk.*.attn_out": "model.layers.*.self_attn.o_proj"}'
    raise HarnessError(
        Code.BAD_OPTION, what, where="names", expected=", ".join(expected) or None, actual=actual, hint=hint
    )
