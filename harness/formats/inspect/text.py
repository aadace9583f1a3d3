"""The tables of `inspect_path` for a terminal."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from harness.errors import printable


def render_text(info: Mapping[str, Any]) -> str:
    """Return the tables of `inspect_path` for a terminal."""
    parts = [f"{info['kind']} {info['path']}"]
    parts += [_table(sorted(info[name].items()), [name, "value"]) for name in ("config", "summary") if name in info]
    parts += [_rows(info[name]) for name in ("requests", "steps", "taps", "tensors") if name in info]
    parts += [f"left out: {item}" for item in info.get("left_out", ())]
    parts += map(_render_file, info.get("files", ()))
    if "totals" in info:
        parts += _render_totals(info["totals"])
    if "against_config" in info:
        parts.append(_render_against_config(info["against_config"]))
    return printable("\n\n".join(parts))


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
