"""One tensor of anything that holds tensors, alone or beside that of another place."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from harness.errors import Code, HarnessError, printable
from harness.formats.inspect.sources import Row, Source, open_source
from harness.formats.inspect.statistics import describe, difference, sliced

_BAR = 40


def read_values(
    path: str | os.PathLike[str], name: str, *, row: Row | None = None, part: str | None = None
) -> torch.Tensor:
    """Return a tensor, or a part of it, in its own dtype.

    Args:
        path: checkpoint or an embedded one's name, safetensors or GGUF file, recording or golden, or a folder of dumped
            tensors.
        name: of the tensor or tap; without a layer's number nothing is guessed.
        row: request and position, in a recording.
        part: such as `0:4,:8`, of what the row leaves.

    Raises:
        HarnessError: BAD_OPTION; as the reader of what lies at `path`.
    """
    return _values(open_source(Path(path)), name, row, part)


def _values(source: Source, name: str, row: Row | None, part: str | None) -> torch.Tensor:
    tensor = source.tensor(name) if row is None else source.row(name, row)
    return tensor if part is None else sliced(tensor, part)


def _same_rows(first: Source, second: Source, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rows of a tap that two recordings have; None where one of them is no recording."""
    if first.rows is None or second.rows is None:
        return None
    own, other = first.tensor(name), second.tensor(name)
    places, others = first.rows(name), second.rows(name)
    common = sorted(places.keys() & others.keys())
    return own[[places[row] for row in common]], other[[others[row] for row in common]]


def inspect_values(
    paths: Sequence[Path], name: str, *, row: Row | None = None, part: str | None = None
) -> dict[str, Any]:
    """Describe a tensor of each path, and how far the second is from the first; raises as `read_values`.

    Of a tap of two recordings these are the rows that both have, by request and position.
    """
    sources = [open_source(path) for path in paths]
    pair = _same_rows(sources[0], sources[1], name) if len(sources) > 1 and row is None else None
    if pair is None:
        tensors = [_values(source, name, row, part) for source in sources]
    else:
        tensors = [tensor if part is None else sliced(tensor, part) for tensor in pair]
    described = [{"path": str(path), **describe(tensor)} for path, tensor in zip(paths, tensors, strict=True)]
    found: dict[str, Any] = {"schema_version": 1, "kind": "values", "name": name, "tensors": described}
    if row is not None:
        found |= {"request": row[0], "position": row[1]}
    return found if len(tensors) == 1 else found | {"difference": difference(tensors[0], tensors[1])}


def parse_row(text: str) -> Row:
    """Return request and position of `REQUEST:POSITION`; raises HarnessError (BAD_OPTION)."""
    request, _, position = text.partition(":")
    if not (request.isdecimal() and position.isdecimal()):
        what = "a row is a request and a position"
        raise HarnessError(Code.BAD_OPTION, what, where="--row", expected="REQUEST:POSITION, such as 0:37", actual=text)
    return int(request), int(position)


def values_text(found: Mapping[str, Any]) -> str:
    """Return the description of tensors for a terminal."""
    where = f", request {found['request']}, position {found['position']}" if "request" in found else ""
    parts = [f"{found['name']}{where}", *map(_tensor_text, found["tensors"])]
    if "difference" in found:
        parts.append(_difference_text(found["difference"]))
    return printable("\n\n".join(parts))


def _tensor_text(found: Mapping[str, Any]) -> str:
    figures = [(key, f"{found[key]:.6g}") for key in ("min", "max", "mean", "rms", "std") if key in found]
    counts = [(key.removeprefix("num_"), found[key]) for key in ("num_nan", "num_infinite", "num_zeros") if found[key]]
    lines = [f"{found['path']}: {found['dtype']} {found['shape']}", tabulate([*figures, *counts], tablefmt="plain")]
    if "histogram" in found:
        lines.append(_bars(found["histogram"]))
    return "\n".join([*lines, "first values", str(torch.tensor(_numbers(found["first_values"]), dtype=torch.float64))])


def _numbers(values: Any) -> Any:
    return [_numbers(value) for value in values] if isinstance(values, list) else float(values)


def _bars(histogram: Mapping[str, Sequence[float]]) -> str:
    most = max(histogram["counts"])
    rows = [
        (f"{low:.4g}", "#" * round(_BAR * count / most), int(count))
        for low, count in zip(histogram["edges"], histogram["counts"], strict=False)
    ]
    return tabulate(rows, headers=["from", "elements", ""], tablefmt="plain", disable_numparse=True)


def _difference_text(found: Mapping[str, Any]) -> str:
    text = f"{found['num_equal']:,} of {found['num_elements']:,} elements are equal"
    if "at" not in found:
        return text
    first, second, largest, relative, cosine = _numbers(
        [*found["values"], *(found[key] for key in ("max_difference", "relative_l2", "cosine"))]
    )
    return (
        f"{text}\nlargest difference {largest:.6g} at {found['at']}: {first:.9g}, {second:.9g}\n"
        f"relative L2 {relative:.4g}, cosine {cosine:.9g}"
    )
