"""Reads the header of a GGUF file, and believes nothing it says before having checked it.

Pure Python, without the package gguf: the layout is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Every count and length is held against the
bytes that are left in the file before anything is made of it.
"""

import math
import mmap
import os
import reprlib
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.types import TYPES, GGMLType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LARGEST = 2**63 - 1

Value = int | float | bool | str | list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """The place of one tensor in the file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    """Rows first, as torch has it; the file has the innermost dimension first."""
    begin: int
    """First byte, counted from the file's begin."""

    @property
    def num_elements(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor occupies."""
        return self.num_elements // self.type.block_size * self.type.block_bytes

    @property
    def end(self) -> int:
        """One past the last byte, counted from the file's begin."""
        return self.begin + self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFHeader:
    """Layout of one GGUF file."""

    path: Path
    version: int
    metadata: dict[str, Value]
    tensors: tuple[GGUFTensor, ...]
    """In the order of the file."""
    data_offset: int
    """The offset of the data section in the file."""
    file_bytes: int


def read_gguf_header(path: str | os.PathLike[str]) -> GGUFHeader:
    """Read and check the header of the GGUF file at `path`.

    Raises:
        HarnessError: DAMAGED_GGUF, with the numbers that do not fit; UNSUPPORTED_GGUF: another version, a type of
            tensor that is not known.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            damaged(path, "the path is not a regular file")
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                damaged(path, "the file is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        damaged(path, f"the file cannot be read: {error.strerror}")
    except ValueError:  # a NUL in the path
        damaged(path, "the path is not a file's")


@dataclass(slots=True)
class _Reader:
    """Reads a file from front to back."""

    path: Path
    data: mmap.mmap
    at: int = 0
    metadata: dict[str, Value] = field(default_factory=dict)

    def header(self) -> GGUFHeader:
        version = self._version()
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        self._refuse_count("metadata entries", num_entries, at_least_bytes=8 + 4 + 1)
        for _ in range(num_entries):
            self._entry()
        self._refuse_count("tensors", num_tensors, at_least_bytes=8 + 4 + 4 + 8)
        relative = [self._tensor() for _ in range(num_tensors)]
        alignment = self._alignment()
        offset = -(-self.at // alignment) * alignment
        tensors = tuple(self._placed(tensor, offset, alignment) for tensor in relative)
        self._check_places(tensors)
        return GGUFHeader(
            path=self.path,
            version=version,
            metadata=self.metadata,
            tensors=tensors,
            data_offset=offset,
            file_bytes=len(self.data),
        )

    def _version(self) -> int:
        magic = self._bytes(4)
        if magic != MAGIC:
            self._refuse("the file does not begin with GGUF", expected=MAGIC, actual=reprlib.repr(magic))
        version: int = self._number("I")
        if version in VERSIONS:
            return version
        what = "the file is written for big-endian machines" if not version & 0xFFFF else "the version is not read"
        raise HarnessError(
            Code.UNSUPPORTED_GGUF,
            what,
            where=self.path,
            expected="version 2 or 3",
            actual=version,
            hint="convert the model again with a current converter",
        )

    def _entry(self) -> None:
        key = self._string("a key")
        if key in self.metadata:
            self._refuse("a key appears twice", key=key)
        self.metadata[key] = self._value(key, self._number("I"))

    def _value(self, key: str, kind: int) -> Value:
        if kind in _NUMBERS:
            number: int | float = self._number(_NUMBERS[kind])
            return number
        if kind == _BOOL:
            return bool(self._number("B"))
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            self._refuse("the type of a value is unknown", key=key, expected="0 to 12", actual=kind)
        return self._array(key)

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            self._refuse_count(f"values of {key}", count, at_least_bytes=struct.calcsize(f"<{_NUMBERS[kind]}"))
            return list(self._unpack(f"<{count}{_NUMBERS[kind]}"))
        if kind not in (_BOOL, _STRING):
            what = "an array holds arrays, or values of an unknown type"
            self._refuse(what, key=key, expected="numbers, booleans or strings", actual=kind)
        self._refuse_count(f"values of {key}", count, at_least_bytes=1 if kind == _BOOL else 8)
        return [self._value(key, kind) for _ in range(count)]

    def _tensor(self) -> tuple[str, GGMLType, tuple[int, ...], int]:
        name = self._string("a tensor's name")
        num_dims = self._number("I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            expected = f"1 to {MAX_DIMENSIONS}"
            self._refuse("the number of dimensions is impossible", tensor=name, expected=expected, actual=num_dims)
        shape = tuple(reversed(self._unpack(f"<{num_dims}Q")))
        number, offset = self._number("I"), self._number("Q")
        if number not in TYPES:
            raise HarnessError(
                Code.UNSUPPORTED_GGUF,
                "the type of a tensor is unknown",
                where=f"{self.path}: tensor {reprlib.repr(name)}",
                expected=", ".join(item.name for item in TYPES.values()),
                actual=f"type {number}",
                hint="update inference-harness, or quantise to another type",
            )
        self._check_shape(name, shape, TYPES[number])
        return name, TYPES[number], shape, offset

    def _check_shape(self, name: str, shape: tuple[int, ...], kind: GGMLType) -> None:
        if not all(shape) or math.prod(shape) * 8 > _LARGEST:
            self._refuse("the shape is impossible", tensor=name, actual=reprlib.repr(shape))
        if shape[-1] % kind.block_size:
            what = f"a row of {kind.name} is no whole number of blocks"
            self._refuse(what, tensor=name, expected=f"a multiple of {kind.block_size}", actual=shape[-1])

    def _placed(self, parts: tuple[str, GGMLType, tuple[int, ...], int], offset: int, alignment: int) -> GGUFTensor:
        name, kind, shape, begin = parts
        if begin % alignment:
            expected = f"a multiple of {alignment}"
            self._refuse("a tensor is not aligned", tensor=name, expected=expected, actual=begin)
        return GGUFTensor(name=name, type=kind, shape=shape, begin=offset + begin)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            self._refuse("the alignment is impossible", key="general.alignment", actual=reprlib.repr(alignment))
        return alignment

    def _check_places(self, tensors: tuple[GGUFTensor, ...]) -> None:
        names = set[str]()
        for tensor in tensors:
            if tensor.name in names:
                self._refuse("two tensors have the same name", tensor=tensor.name)
            names.add(tensor.name)
        end = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.begin):
            if tensor.begin < end:
                self._refuse("two tensors overlap", tensor=tensor.name, actual=f"begins at byte {tensor.begin}")
            end = tensor.end
            if end > len(self.data):
                expected = f"{end} bytes"
                self._refuse("the file is truncated", tensor=tensor.name, expected=expected, actual=len(self.data))

    def _refuse_count(self, what: str, count: int, *, at_least_bytes: int) -> None:
        room = (len(self.data) - self.at) // at_least_bytes
        if count > room:
            self._refuse(f"there are more {what} than the file has room for", expected=f"at most {room}", actual=count)

    def _string(self, what: str) -> str:
        length = self._number("Q")
        if length > len(self.data) - self.at:
            actual = f"{length} bytes of {len(self.data) - self.at}"
            self._refuse(f"the text of {what} is longer than the file", actual=actual)
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"the text of {what} is no UTF-8", actual=reprlib.repr(str(error)))

    def _number(self, code: str) -> Any:
        return self._unpack(f"<{code}")[0]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def _bytes(self, count: int) -> bytes:
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            self._refuse("the file ends inside its header", expected=f"{self.at} bytes", actual=len(self.data))
        return self.data[begin : self.at]

    def _refuse(
        self,
        what: str,
        *,
        key: str | None = None,
        tensor: str | None = None,
        expected: object = None,
        actual: object = None,
    ) -> NoReturn:
        named = f": tensor {reprlib.repr(tensor)}" if tensor is not None else ""
        named = f": {reprlib.repr(key)}" if key is not None else named
        damaged(f"{self.path}{named}", what, expected=expected, actual=actual)


def damaged(where: object, what: str, *, expected: object = None, actual: object = None) -> NoReturn:
    """Raise DAMAGED_GGUF."""
    hint = "fetch or write the file again"
    raise HarnessError(Code.DAMAGED_GGUF, what, where=where, expected=expected, actual=actual, hint=hint)
