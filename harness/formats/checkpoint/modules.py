"""The modules of a checkpoint: their tree and classes as transformers builds them, and the file of each parameter."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tabulate import tabulate

from harness.base.progress import quiet_transformers
from harness.errors import printable
from harness.formats.checkpoint.against_config import is_converted, meta_model, tied_tensors
from harness.formats.checkpoint.checkpoint import Checkpoint

_Module = Mapping[str, Any]


def module_tables(checkpoint: Checkpoint) -> dict[str, Any]:
    """Describe the modules of a checkpoint, without reading a weight.

    Returns:
        `modules`: path, class and `parameters` of each, these with name, shape, and dtype and file of the tensor that
        is loaded into it (null where the checkpoint has none of that name) or the tensor that it is `tied_to`.
        `note`: why no files are known, or null.

    Raises:
        HarnessError: as `against_config`, and as `Checkpoint.tensors`.
    """
    with quiet_transformers():
        model = meta_model(checkpoint.folder, checkpoint.config)
        tied, is_renamed = tied_tensors(model), is_converted(model)
    tensors: Mapping[str, Any] = {} if is_renamed else checkpoint.tensors

    def parameter(path: str, name: str, shape: Sequence[int]) -> dict[str, Any]:
        entry, file = tensors.get(f"{path}.{name}", (None, None))
        tied_to = None if file else tied.get(f"{path}.{name}")
        stored = {"dtype": entry and entry.dtype, "file": file and file.name, "tied_to": tied_to}
        return {"name": name, "shape": list(shape), **stored}

    modules = [
        {
            "path": path,
            "class": type(module).__name__,
            "parameters": [parameter(path, name, x.shape) for name, x in module.named_parameters(recurse=False)],
        }
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    note = "transformers renames or merges the tensors of this model as it loads them" if is_renamed else None
    return {"schema_version": 1, "kind": "modules", "path": str(checkpoint.folder), "note": note, "modules": modules}


def modules_text(tables: Mapping[str, Any]) -> str:
    """Return the tree for a terminal; items of a list with the same modules and shapes share their lines."""
    modules, below = tables["modules"], dict[str, list[_Module]]()
    for module in modules[1:]:
        below.setdefault(module["path"].rpartition(".")[0], []).append(module)
    shapes = [item["shape"] for module in modules for item in module["parameters"] if not item["tied_to"]]
    parts = [f"modules {tables['path']}: {sum(map(math.prod, shapes)):,} parameters, tied ones once"]
    parts += [f"no files are known: {tables['note']}"] if tables["note"] else []
    headers = ["module", "class", "parameter", "shape", "dtype", "file"]
    rows = list(_rows(modules[0], "model", below, 0))
    table = tabulate(rows, headers, disable_numparse=True, preserve_whitespace=True)
    return printable("\n\n".join([*parts, table]), keeps_lines=True)


def _rows(module: _Module, name: str, below: Mapping[str, Sequence[_Module]], depth: int) -> Iterator[list[str]]:
    head, *others = [_cells(item) for item in module["parameters"]] or [[""] * 4]
    yield ["  " * depth + name, module["class"], *head]
    yield from (["", "", *cells] for cells in others)

    def form(child: _Module) -> str:
        """Return what is equal for items of a list that have the same modules, shapes and files."""
        inside = [(_name(item), form(item)) for item in below.get(child["path"], ())]
        return str((child["class"], [*map(_cells, child["parameters"])], inside))

    for _, group in groupby(
        below.get(module["path"], ()), key=lambda child: (_name(child).isdigit() or child["path"], form(child))
    ):
        first, *rest = group
        yield from _rows(first, f"{_name(first)} to {_name(rest[-1])}" if rest else _name(first), below, depth + 1)


def _name(module: _Module) -> str:
    return str(module["path"].rpartition(".")[2])


def _cells(parameter: Mapping[str, Any]) -> list[str]:
    place = parameter["file"] or (f"tied to {parameter['tied_to']}" if parameter["tied_to"] else "")
    return [parameter["name"], str(parameter["shape"]), parameter["dtype"] or "", place]
