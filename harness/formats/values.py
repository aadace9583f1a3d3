"""One tensor by its name, wherever it lies (weights, recordings, goldens, dumps), alone or beside another one."""

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from harness.base.files import parse_json, read_bytes
from harness.errors import Code, HarnessError, printable
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.checkpoint import read_shard
from harness.formats.checkpoint.locate import at_hand, reader_of
from harness.formats.recording import Recording
from harness.formats.recording.format import MANIFEST_NAME
from harness.formats.safetensors_header import read_header
from harness.formats.tensors import read_tensors

Row = tuple[int, int]
"""Request and position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a path holds."""

    kind: str
    """`checkpoint`, `gguf`, `recording`, `safetensors` or `tensors`."""
    names: tuple[str, ...]
    read: Callable[[str], torch.Tensor]
    """Return a tensor; of a recording, a tap's rows in the order in which they were computed."""
    rows: Callable[[str], Mapping[Row, int]] | None = None
    """Of a recording: place of each of a tap's rows in its tensor; the last, where it was computed again."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of a name; raises HarnessError (BAD_OPTION) with the nearest names where there is none."""
        if name not in self.names:
            near = difflib.get_close_matches(name, self.names, n=3, cutoff=0.4) or self.names[:3]
            raise HarnessError(
                Code.BAD_OPTION,
                f"there is no tensor {name!r}",
                where="--tensor",
                expected=f"one of {len(self.names)} names, such as {', '.join(near)}",
                actual=name,
            )
        return self.read(name)

    def row(self, name: str, row: Row) -> torch.Tensor:
        """Return a tap's row; raises HarnessError (BAD_OPTION) where there is no such row."""
        tensor = self.tensor(name)
        if self.rows is None:
            what, hint = "only the taps of a recording have rows of requests", "leave --row out; --slice takes a part"
            raise HarnessError(Code.BAD_OPTION, what, where="--row", actual=self.kind, hint=hint)
        places = self.rows(name)
        if row not in places:
            what = f"the tap has no row of request {row[0]} at position {row[1]}"
            shown = ", ".join(f"{request}:{position}" for request, position in sorted(places)[:6])
            raise HarnessError(Code.BAD_OPTION, what, where="--row", expected=f"one of {len(places)}: {shown}, ...")
        return tensor[places[row]]


def open_source(path: Path) -> Source:
    """Return the tensors of a checkpoint, a GGUF or safetensors file, a recording or golden, or a folder of tensors.

    The path is a file, a folder, or an embedded checkpoint's name.

    Raises:
        HarnessError: as the reader of what lies there.
    """
    path = at_hand(path)
    if (path / MANIFEST_NAME).is_file():
        return _recording(Recording.open(path, verify=False))
    if (path / CONFIG_NAME).is_file():
        return _weights("checkpoint", {name: file for name, (_, file) in Checkpoint(path).tensors.items()})
    reader = reader_of(path) if path.is_file() else None
    if reader is not None and (tensors := reader.tensors(path)) is not None:
        return Source(kind=path.suffix[1:], names=tuple(tensors), read=lambda name: tensors[name]())
    if path.suffix == ".safetensors":
        return _weights("safetensors", {entry.name: path for entry in read_header(path).tensors})
    dumped = {tensor.name: tensor.tensor for tensor in read_tensors(path).tensors}
    return Source(kind="tensors", names=tuple(dumped), read=dumped.__getitem__)


def _weights(kind: str, files: Mapping[str, Path]) -> Source:
    return Source(kind=kind, names=tuple(files), read=lambda name: read_shard(files[name], name))


def _sketched(folder: Path) -> frozenset[str]:
    """Return the taps of a golden that are kept as sketches (`oracle/golden.py` writes their list)."""
    info = folder / "golden.json"
    if not info.is_file():
        return frozenset()
    try:
        return frozenset(parse_json(read_bytes(info)).get("sketched", ()))
    except (ValueError, AttributeError, TypeError) as error:
        what, hint = "the golden is damaged", "make the golden again"
        raise HarnessError(Code.BAD_MANIFEST, what, where=info, hint=hint) from error


def _recording(recording: Recording) -> Source:
    steps, sketched = recording.steps, _sketched(recording.path)

    def read(name: str) -> torch.Tensor:
        if name in sketched:
            raise HarnessError(
                Code.BAD_OPTION,
                f"this golden of a check's cache holds sketches of {name}, and no values",
                where=recording.path,
                hint="write a golden with all values: harness golden --out DIR",
            )
        return torch.cat([step.tap(name) for step in steps if step.has(name)])

    def rows(name: str) -> Mapping[Row, int]:
        computed: list[Row] = []
        for step in steps:
            if step.has(name):
                covered = step.rows_of(name)
                at = slice(None) if covered is None else covered
                computed += zip(step.request[at].tolist(), step.position[at].tolist(), strict=True)
        return {row: place for place, row in enumerate(computed)}

    names = tuple(entry.name for entry in recording.manifest.taps)
    return Source(kind="recording", names=names, read=read, rows=rows)


NUM_BINS = 16
_SHOWN = 6
"""Values that are shown of each dimension's begin."""


def describe(tensor: torch.Tensor) -> dict[str, Any]:
    """Return dtype, shape, statistics over the finite elements, a histogram and the first values, as JSON has them."""
    values = tensor.detach().to("cpu", torch.float64).flatten()
    finite = values[values.isfinite()]
    described: dict[str, Any] = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "num_nan": int(values.isnan().sum()),
        "num_infinite": int(values.isinf().sum()),
        "num_zeros": int((values == 0).sum()),
    }
    if len(finite):
        described |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
            "rms": float(finite.square().mean().sqrt()),
            "std": float(finite.std(correction=0)),
            "histogram": _histogram(finite),
        }
    first = tensor[tuple(slice(0, _SHOWN) for _ in tensor.shape)]
    return described | {"first_values": _for_json(first.detach().to("cpu", torch.float64).tolist())}


def _for_json(values: Any) -> Any:
    """Return numbers as they are, and what is none (`nan`, `inf`) by its name."""
    if isinstance(values, list):
        return [_for_json(value) for value in values]
    return values if math.isfinite(values) else str(values)


def _histogram(values: torch.Tensor) -> dict[str, Any]:
    low, high = float(values.min()), float(values.max())
    if low == high:
        return {"edges": [low, high], "counts": [len(values)]}
    counts = torch.histc(values, bins=NUM_BINS, min=low, max=high)
    return {
        "edges": torch.linspace(low, high, NUM_BINS + 1, dtype=torch.float64).tolist(),
        "counts": counts.int().tolist(),
    }


def difference(first: torch.Tensor, second: torch.Tensor) -> dict[str, Any]:
    """Return how far the second tensor is from the first; raises HarnessError (BAD_OPTION) for other shapes."""
    if first.shape != second.shape:
        what = "tensors of different shapes cannot be compared"
        expected, actual = list(first.shape), list(second.shape)
        hint = "--slice takes the same part of each"
        raise HarnessError(Code.BAD_OPTION, what, where="BESIDE", expected=expected, actual=actual, hint=hint)
    a, b = (tensor.detach().to("cpu", torch.float64).flatten() for tensor in (first, second))
    distance = (b - a).abs()
    is_equal = (a == b) | (a.isnan() & b.isnan())
    compared: dict[str, Any] = {"num_elements": len(a), "num_equal": int(is_equal.sum())}
    if len(a) and not is_equal.all():
        worst = int(distance.masked_fill(is_equal, -1).nan_to_num(nan=torch.inf).argmax())
        compared |= {
            "max_difference": _for_json(float(distance[worst])),
            "at": [int(at) for at in torch.unravel_index(torch.tensor(worst), first.shape)],
            "values": _for_json([float(a[worst]), float(b[worst])]),
            "relative_l2": _for_json(float(distance.norm() / a.norm())),
            "cosine": _for_json(float(torch.nn.functional.cosine_similarity(a, b, dim=0))),
        }
    return compared


_PART = re.compile(r"(-?\d+)?(:(-?\d+)?)?")


def sliced(tensor: torch.Tensor, text: str) -> torch.Tensor:
    """Return a part of a tensor: `0:4,:8,3` as Python writes it, without steps.

    Raises:
        HarnessError: BAD_OPTION.
    """
    parts = [part.strip() for part in text.split(",")]
    try:
        if len(parts) > tensor.dim():
            raise ValueError(f"{len(parts)} parts for {tensor.dim()} dimensions")
        return tensor[tuple(_part(part) for part in parts)]
    except (ValueError, IndexError) as error:
        what, expected = "this is no part of the tensor", f"such as 0:4,:8 of the shape {list(tensor.shape)}"
        raise HarnessError(
            Code.BAD_OPTION, what, where="--slice", expected=expected, actual=f"{text}: {error}"
        ) from error


def _part(text: str) -> int | slice:
    match = _PART.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"{text!r} is neither a number nor a range")
    first, is_range, last = match.groups()
    return slice(first and int(first), last and int(last)) if is_range else int(first)


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
    first_places, second_places = first.rows(name), second.rows(name)
    common = sorted(first_places.keys() & second_places.keys())
    first_rows = first.tensor(name)[[first_places[row] for row in common]]
    return first_rows, second.tensor(name)[[second_places[row] for row in common]]


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
    table: dict[str, Any] = {"schema_version": 1, "kind": "values", "name": name, "tensors": described}
    if row is not None:
        table |= {"request": row[0], "position": row[1]}
    return table if len(tensors) == 1 else table | {"difference": difference(tensors[0], tensors[1])}


def parse_row(text: str) -> Row:
    """Return request and position of `REQUEST:POSITION`; raises HarnessError (BAD_OPTION)."""
    request, _, position = text.partition(":")
    if not (request.isdecimal() and position.isdecimal()):
        what = "a row is a request and a position"
        raise HarnessError(Code.BAD_OPTION, what, where="--row", expected="REQUEST:POSITION, such as 0:37", actual=text)
    return int(request), int(position)


def values_text(table: Mapping[str, Any]) -> str:
    """Return the description of tensors for a terminal."""
    where = f", request {table['request']}, position {table['position']}" if "request" in table else ""
    parts = [f"{table['name']}{where}", *map(_tensor_text, table["tensors"])]
    if "difference" in table:
        parts.append(_difference_text(table["difference"]))
    return printable("\n\n".join(parts), keeps_lines=True)


def _tensor_text(described: Mapping[str, Any]) -> str:
    figures = [(key, f"{described[key]:.6g}") for key in ("min", "max", "mean", "rms", "std") if key in described]
    counts = [
        (key.removeprefix("num_"), described[key]) for key in ("num_nan", "num_infinite", "num_zeros") if described[key]
    ]
    lines = [
        f"{described['path']}: {described['dtype']} {described['shape']}",
        tabulate([*figures, *counts], tablefmt="plain"),
    ]
    if "histogram" in described:
        lines.append(_bars(described["histogram"]))
    return "\n".join(
        [*lines, "first values", str(torch.tensor(_numbers(described["first_values"]), dtype=torch.float64))]
    )


def _numbers(values: Any) -> Any:
    return [_numbers(value) for value in values] if isinstance(values, list) else float(values)


def _bars(histogram: Mapping[str, Sequence[float]]) -> str:
    most = max(histogram["counts"])
    rows = [
        (f"{low:.4g}", "#" * round(_BAR * count / most), int(count))
        for low, count in zip(histogram["edges"], histogram["counts"], strict=False)
    ]
    return tabulate(rows, headers=["from", "elements", ""], tablefmt="plain", disable_numparse=True)


def _difference_text(compared: Mapping[str, Any]) -> str:
    text = f"{compared['num_equal']:,} of {compared['num_elements']:,} elements are equal"
    if "at" not in compared:
        return text
    first, second, largest, relative, cosine = _numbers(
        [*compared["values"], *(compared[key] for key in ("max_difference", "relative_l2", "cosine"))]
    )
    return (
        f"{text}\nlargest difference {largest:.6g} at {compared['at']}: {first:.9g}, {second:.9g}\n"
        f"relative L2 {relative:.4g}, cosine {cosine:.9g}"
    )
