"""Reads the header of a GGUF file, and believes nothing it says before having checked it.

Pure Python, without the package gguf: the layout is that of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3. Every count and length is held against the
bytes that are left in the file before anything is made of it. The numbers of types are those of `ggml_type` in ggml.h,
the sizes those of the block structures in ggml-common.h.
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


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One type of ggml."""

    name: str
    block_size: int
    """Elements that are stored together; a row is a whole number of blocks."""
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of one element, its share of the block's scales included."""
        return 8 * self.block_bytes / self.block_size


TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}
"""By the number that stands in the file."""

BY_NAME = {item.name: (number, item) for number, item in TYPES.items()}
"""Number and type by name."""

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that hold each element by itself, with torch's names of them."""


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
