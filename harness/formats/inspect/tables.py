"""The contents of tensor files, as JSON-able tables. Only headers are read."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.formats.safetensors_header import Header, TensorEntry


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
    """Count tensors, elements and bytes, by dtype and of all."""
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
