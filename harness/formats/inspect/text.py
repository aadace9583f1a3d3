"""The tables of `inspect_path` for a terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from tabulate import tabulate

from harness.errors import printable


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
    if "bits_per_weight" in totals:
        parts.append(f"{totals['bits_per_weight']:.2f} bits per weight")
    if "against_config" in info:
        parts.append(_render_against_config(info["against_config"]))
    return printable("\n\n".join(parts))


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
