"""A machine that nobody has: `pytest -p tests.other_kernels` rounds torch's results on a CPU by shape.

Another processor, library or number of threads adds in another order, and chooses the order by the shapes. So a test
that expects the same bits of two shapes passes on one machine and fails on another. Here each product, sum and
transcendental function moves some of its results by a last bit. Which ones follows from the shapes, strides and dtypes
of what it is given, and from the value: the same computation gives the same bits, and so do equal rows of one product.
"""

import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch

OPERATORS = {
    "mm": "out", "addmm": "out", "bmm": "out", "baddbmm": "out", "mv": "out", "addmv": "out",
    "sum.dim_IntList": "IntList_out", "mean.dim": "out", "cumsum": "out", "linalg_vector_norm": "out",
    "_softmax": "out", "_log_softmax": "out", "logsumexp": "out",
    "exp": "out", "sin": "out", "cos": "out", "tanh": "out", "sigmoid": "out", "silu": "out", "gelu": "out",
    "log": "out",
}  # fmt: skip
"""Each functional operator, and its overload that writes into a tensor: that one is torch's own still."""
SHARE = 1 / 16
"""Of results in 32 and 64 bits that move by a last bit: it adds half of a correct rounding's error at most, which
bounds of real machines hold."""
NARROW = {torch.bfloat16, torch.float16}
PART = 1 / 64
"""Of a last bit of 16 bits: all results move by it before they are rounded to 16 bits, as sums in float32 of another
order do. So many of them come out as the other neighbour, and none is off by more than a rounding and this part."""

_BITS = {torch.float64: torch.int64, torch.float32: torch.int32}
_ODD = 0x1E3779B97F4A7C15
"""A multiplier after Knuth: its high bits depend on all bits of a value."""


def described(value: Any) -> Any:
    """Return what a kernel is chosen by."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(described(item) for item in value)
    return value if isinstance(value, (int, str, torch.dtype)) or value is None else type(value).__name__


def moved(key: str, result: torch.Tensor, *, share: float = SHARE, step: float | None = None) -> torch.Tensor:
    """Move a share of a result by a step, or by a last bit: which ones follows from their values and the key."""
    if result.dtype not in _BITS or not result.numel():
        return result
    bits = result.abs().view(_BITS[result.dtype]).to(torch.int64)
    drawn = ((bits ^ zlib.crc32(key.encode())) * _ODD >> 40) & 0xFFFF
    limit = round(share * 0x8000)
    signs = (drawn < limit).to(result.dtype) - (drawn > 0xFFFF - limit).to(result.dtype)
    return result.mul_(1 + (step or torch.finfo(result.dtype).eps) * signs)


def widened(value: Any) -> Any:
    """Return tensors of 16 bits in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in NARROW else value
    if isinstance(value, (list, tuple)):
        return type(value)(widened(item) for item in value)
    return value


def dtype_of_result(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an operator's result."""
    if dtype.is_floating_point or dtype.is_complex or name in {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv"}:
        return dtype
    return torch.int64 if name in {"sum", "cumsum"} else torch.get_default_dtype()


def replacement(name: str, overload: str) -> Callable[..., torch.Tensor]:
    """Return an operator that calls torch's own and moves what it gives."""
    native = getattr(getattr(torch.ops.aten, name.partition(".")[0]), overload)
    short = name.partition(".")[0]

    def operator(*args: Any, **options: Any) -> torch.Tensor:
        dtype = next(argument.dtype for argument in args if isinstance(argument, torch.Tensor))
        made, key = options.get("dtype") or dtype_of_result(short, dtype), f"{name} {described(args)}"
        if made in NARROW:
            wide = {**options, "dtype": torch.float32} if options.get("dtype") else options
            result = native(*widened(args), **wide, out=torch.empty(0, dtype=torch.float32))
            return moved(key, result, share=1.0, step=PART * torch.finfo(made).eps).to(made)
        return moved(key, native(*args, **options, out=torch.empty(0, dtype=made)))

    return operator


def replace_kernels() -> torch.library.Library:
    """Put the replacements in torch's place, until the library is deleted."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="[\\s\\S]*[Oo]verrid")
        for name, overload in OPERATORS.items():
            library.impl(name, replacement(name, overload), "CPU")
    return library


LIBRARY = replace_kernels()
