"""Reads the header of a safetensors file, and believes nothing it says before having checked it.

Pure Python: `harness inspect` and the recording reader need a file's layout, not its tensors. The checks are those of
https://huggingface.co/docs/safetensors (Format) with every number checked against the size of the file, so that a
damaged or hostile file costs no more memory than its real header.
"""

import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeGuard

from harness.errors import Code, HarnessError

MAX_HEADER_BYTES = 100_000_000
"""Longest JSON header that the format's own library reads."""

LENGTH_BYTES = 8
"""Size of the field that holds the length of the JSON header."""

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64, "C64": 64,
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""Bits of one element by dtype name."""

_LARGEST = 2**63 - 1
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The place of one tensor in the file."""

    name: str
    dtype: str
    """A key of `DTYPE_BITS`."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the file's data section (`Header.data_offset`)."""
    end: int
    """One past the last byte, counted likewise."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor occupies."""
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Header:
    """Layout of one safetensors file."""

    header_bytes: int
    """Length of the JSON header, its padding included."""
    metadata: dict[str, str]
    """The file's `__metadata__`; empty if it has none."""
    tensors: tuple[TensorEntry, ...]
    """In the order of their bytes."""
    data_offset: int
    """The offset of the data section in the file."""
    file_bytes: int

    @cached_property
    def by_name(self) -> Mapping[str, TensorEntry]:
        """The tensors by name."""
        return {entry.name: entry for entry in self.tensors}


def read_header(path: str | os.PathLike[str], known: dict[bytes, Header] | None = None) -> Header:
    """Read and check the header of the safetensors file at `path`.

    Args:
        path: of the file.
        known: headers by their text; a file of the same text and size gets the same header, any other is added.

    Raises:
        HarnessError: DAMAGED_SAFETENSORS, with the numbers that do not fit.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            _damaged(path, "the path is not a regular file")
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            text = _read_json(path, file, file_bytes)
    except OSError as error:
        _damaged(path, f"the file cannot be read: {error.strerror}")
    except ValueError:  # a NUL in the path
        _damaged(path, "the path is not a file's")
    same = None if known is None else known.get(text)
    if same is not None and same.file_bytes == file_bytes:
        return same
    metadata, tensors = _parse(path, text)
    _check_coverage(path, tensors, file_bytes - LENGTH_BYTES - len(text))
    header = Header(
        header_bytes=len(text),
        metadata=metadata,
        tensors=tuple(tensors),
        data_offset=LENGTH_BYTES + len(text),
        file_bytes=file_bytes,
    )
    if known is not None:
        known[text] = header
    return header


def _read_json(path: Path, file: BinaryIO, file_bytes: int) -> bytes:
    field = file.read(LENGTH_BYTES)
    if len(field) < LENGTH_BYTES:
        _damaged(
            path,
            "the file is too short for a header length",
            expected=f"{LENGTH_BYTES} bytes",
            actual=f"{file_bytes} bytes",
        )
    (length,) = struct.unpack("<Q", field)
    room = file_bytes - LENGTH_BYTES
    if length > room:
        _damaged(path, "the header is longer than the file", expected=f"at most {room} bytes", actual=f"{length} bytes")
    if length > MAX_HEADER_BYTES:
        _damaged(path, "the header is too long", expected=f"at most {MAX_HEADER_BYTES} bytes", actual=f"{length} bytes")
    text = file.read(length)
    if len(text) != length:
        _damaged(path, "the file ends inside its header", expected=f"{length} bytes", actual=f"{len(text)} bytes")
    return text


def _parse(path: Path, text: bytes) -> tuple[dict[str, str], list[TensorEntry]]:
    if not text.startswith(b"{"):
        _damaged(path, "the header does not begin with '{'", actual=reprlib.repr(text[:16]))
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
        for name in entries:
            name.encode("utf-8")  # a lone surrogate could not be printed
    except RecursionError:
        _damaged(path, "the header is nested too deeply")
    except ValueError as error:
        _damaged(path, "the header is not valid JSON", actual=reprlib.repr(str(error)))
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _damaged(path, "__metadata__ is not a table of strings", actual=reprlib.repr(metadata))
    tensors = [_parse_entry(path, name, entry) for name, entry in entries.items()]
    return metadata, sorted(tensors, key=lambda entry: (entry.begin, entry.end))


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {reprlib.repr(key)} appears twice")
        result[key] = value
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse_entry(path: Path, name: str, entry: object) -> TensorEntry:
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        _damaged(path, "an entry is not {dtype, shape, data_offsets}", tensor=name, actual=reprlib.repr(entry))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        expected = ", ".join(DTYPE_BITS)
        _damaged(path, "the dtype is unknown", tensor=name, expected=expected, actual=reprlib.repr(dtype))
    if not _are_sizes(shape) or math.prod([size or 1 for size in shape]) * DTYPE_BITS[dtype] > _LARGEST:
        _damaged(path, "the shape is not a list of sizes", tensor=name, actual=reprlib.repr(shape))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(path, "data_offsets is not [begin, end]", tensor=name, actual=reprlib.repr(offsets))
    bits, num_bytes = math.prod(shape) * DTYPE_BITS[dtype], offsets[1] - offsets[0]
    if bits != 8 * num_bytes:
        what = f"data_offsets contradict {dtype} {reprlib.repr(shape)}"
        expected = f"{bits / 8} bytes" if bits % 8 else f"{bits // 8} bytes"
        _damaged(path, what, tensor=name, expected=expected, actual=f"{num_bytes} bytes")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size <= _LARGEST for size in value)


def _check_coverage(path: Path, tensors: Iterable[TensorEntry], data_bytes: int) -> None:
    end = 0
    for entry in tensors:
        if entry.begin != end:
            what = "the data has a hole" if entry.begin > end else "two tensors overlap"
            expected = f"begin at byte {end}"
            _damaged(path, what, tensor=entry.name, expected=expected, actual=f"byte {entry.begin}")
        end = entry.end
    if end != data_bytes:
        what = "the file is truncated" if end > data_bytes else "bytes follow the last tensor"
        _damaged(path, what, expected=f"{end} bytes of data", actual=f"{data_bytes} bytes")


def _damaged(
    path: Path, what: str, *, tensor: str | None = None, expected: object = None, actual: object = None
) -> NoReturn:
    where = path if tensor is None else f"{path}: tensor {reprlib.repr(tensor)}"
    hint = "fetch or write the file again"
    raise HarnessError(Code.DAMAGED_SAFETENSORS, what, where=where, expected=expected, actual=actual, hint=hint)
