"""ggml's tensors from Python: what the evaluation callback of llama.cpp hands out.

llama-cpp-python wraps llama.h and not ggml.h, so the few functions that are needed are called by ctypes. The fields of
`ggml_tensor` are read in place; that they lie where this file says is checked at the first tensor.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf.header import PLAIN, TYPES
from harness.extensions.llamacpp.gguf.model import missing_package

_MAX_DIMS, _MAX_SRC, _OP_PARAMS = 4, 10, 16
_DTYPES = {name: getattr(torch, dtype) for name, dtype in {**PLAIN, "I32": "int32"}.items()}


class _Fields(ctypes.Structure):
    """The beginning of `struct ggml_tensor`, up to its name."""


_Fields._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _MAX_DIMS),
    ("nb", ctypes.c_size_t * _MAX_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * _OP_PARAMS),
    ("flags", ctypes.c_int32),
    ("src", ctypes.c_void_p * _MAX_SRC),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def is_installed() -> bool:
    """Whether the package llama_cpp can be imported."""
    try:
        llama()
    except HarnessError:
        return False
    return True


@cache
def llama() -> Any:
    """Return the package llama_cpp, its backend initialised and its log silent.

    Raises:
        HarnessError: PACKAGE_MISSING.
    """
    try:
        import llama_cpp
    except ImportError as error:
        raise missing_package("llama-cpp-python", error) from error
    silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama.silence = silence  # type: ignore[attr-defined]  # kept: C calls it
    llama_cpp.llama_log_set(silence, None)
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache
def _ggml() -> Any:
    folder = Path(llama().__file__).parent / "lib"
    files = sorted(folder.glob("*ggml-base*"), key=lambda file: len(file.name))
    if not files:
        raise HarnessError(Code.PACKAGE_MISSING, "llama-cpp-python has no library ggml-base", where=folder)
    library = ctypes.CDLL(str(files[0]))
    library.ggml_get_name.restype, library.ggml_get_name.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.ggml_op_desc.restype, library.ggml_op_desc.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    library.ggml_nbytes.restype, library.ggml_nbytes.argtypes = ctypes.c_size_t, [ctypes.c_void_p]
    library.ggml_backend_tensor_get.restype = None
    library.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
    return library


class Tensor:
    """One tensor of a graph, valid while the callback runs."""

    __slots__ = ("_fields", "address")

    def __init__(self, address: int) -> None:
        self.address = address
        self._fields = _Fields.from_address(address)

    def check_layout(self) -> None:
        """Refuse a ggml whose tensors have another layout.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE.
        """
        expected = self.address + _Fields.name.offset
        actual = _ggml().ggml_get_name(self.address)
        if actual != expected:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "this version of ggml lays out its tensors in another way",
                where="llama-cpp-python",
                expected=f"the name at byte {_Fields.name.offset}",
                actual=f"byte {actual - self.address}",
                hint="install llama-cpp-python 0.3.36",
            )

    @property
    def name(self) -> str:
        """The name; the buffers of weights have those of the GGUF file."""
        return bytes(self._fields.name).decode("utf-8", "replace")

    @property
    def op(self) -> str:
        """Its operator: `MUL_MAT`, `ADD`; of a gated unit its kind: `SWIGLU`."""
        described: bytes = _ggml().ggml_op_desc(self.address)
        return described.decode()

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, the outermost first."""
        return tuple(reversed(self._fields.ne))

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return int(_ggml().ggml_nbytes(self.address))

    @property
    def itemsize(self) -> float:
        """Bytes of one element, its share of a block's scales included."""
        return TYPES[self._fields.type].bits_per_weight / 8

    @property
    def sources(self) -> "list[Tensor]":
        """Its operands."""
        return [Tensor(address) for address in self._fields.src if address]

    def source(self, index: int) -> "Tensor | None":
        """Return an operand; None if there is none."""
        address = self._fields.src[index]
        return Tensor(address) if address else None

    def values(self) -> torch.Tensor:
        """Copy the content: a contiguous tensor of `shape`.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE for a quantised tensor, or one that is not contiguous.
        """
        dtype = _DTYPES.get(TYPES[self._fields.type].name) if self._fields.type in TYPES else None
        if dtype is None or not self._is_contiguous(dtype.itemsize):
            what = f"the tensor {self.name!r} is quantised, or not contiguous"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="llamacpp", actual=self.op)
        values = torch.empty(self.shape, dtype=dtype)
        if values.numel():
            _ggml().ggml_backend_tensor_get(self.address, values.data_ptr(), 0, values.nbytes)
        return values

    def _is_contiguous(self, itemsize: int) -> bool:
        stride = itemsize
        for size, step in zip(self._fields.ne, self._fields.nb, strict=True):
            if size > 1 and step != stride:
                return False
            stride *= size
        return True
