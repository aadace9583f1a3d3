"""Formats that numbers may have gone through: 16-bit dtypes, values cut off, 4 and 8 bits with and without scales."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

Change = Callable[[torch.Tensor], torch.Tensor]
"""From float64 to float64 of the same shape."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_MANTISSA_BITS = {
    torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, torch.float8_e4m3fn: 3, torch.float8_e5m2: 2,
}  # fmt: skip
_LARGEST_INT8, _LARGEST_INT4 = 127, 7
_GROUPS = (16, 32, 64, 128)


def name_of(dtype: torch.dtype) -> str:
    """Return `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a dtype and back to float64."""
    return x.to(dtype).to(torch.float64)


def cut_off(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Drop the bits that the dtype has no room for, towards zero."""
    least = math.frexp(torch.finfo(dtype).smallest_normal)[1]  # below it, steps grow no smaller
    step = 2.0 ** (torch.frexp(x).exponent.clamp(min=least) - _MANTISSA_BITS[dtype] - 1).to(torch.float64)
    return (x / step).trunc() * step


def int8(x: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """Round to 255 levels between minus and plus the largest magnitude over some dimensions, or over all of them."""
    largest = x.abs().amax() if dims is None else x.abs().amax(dim=dims, keepdim=True)
    scale = _positive(largest) / _LARGEST_INT8
    return (x / scale).round() * scale


def float8(x: torch.Tensor, dtype: torch.dtype, dims: tuple[int, ...] | None) -> torch.Tensor:
    """Round to a float8 whose largest number is the largest magnitude over some dimensions, or over all of them."""
    largest = x.abs().amax() if dims is None else x.abs().amax(dim=dims, keepdim=True)
    scale = _positive(largest) / torch.finfo(dtype).max
    return rounded((x / scale).to(torch.float32), dtype) * scale


def _float8_without_its_scale(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return float8(x, dtype, None) * (torch.finfo(dtype).max / _positive(x.abs().amax()))


def of_weights(width: int) -> Iterator[tuple[str, Change]]:
    """Yield what a weight [O, I] of so many inputs may be kept in, in words, and what that makes of it."""
    for dtype in HALF_DTYPES:
        yield f"in {name_of(dtype)}", partial(rounded, dtype=dtype)
        yield f"cut off to {name_of(dtype)} instead of rounded", partial(cut_off, dtype=dtype)
    yield "in int8, with one scale for each output", partial(int8, dims=(1,))
    yield "in int8, with one scale for all of it", partial(int8, dims=None)
    for size in _GROUPS:
        if width % size == 0 and size < width:
            yield f"in int8, with one scale for {size} inputs", partial(_int8_in_groups, size=size)
            for what, form in _INT4.items():
                yield f"in int4, with {what} for {size} inputs", partial(_in_int4, size=size, form=form)
    for dtype in FLOAT8_DTYPES:
        name = name_of(dtype)
        yield f"in {name}, without a scale", partial(rounded, dtype=dtype)
        yield f"in {name}, with one scale for all of it", partial(float8, dtype=dtype, dims=None)
        yield f"in {name}, and its one scale is left out", partial(_float8_without_its_scale, dtype=dtype)
        yield f"in {name}, with one scale for each output", partial(float8, dtype=dtype, dims=(1,))


def _int8_in_groups(x: torch.Tensor, size: int) -> torch.Tensor:
    return int8(x.unflatten(1, (-1, size)), (2,)).flatten(1)


def _in_int4(x: torch.Tensor, size: int, form: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return form(x.unflatten(1, (-1, size))).flatten(1)


def _of_largest(x: torch.Tensor) -> torch.Tensor:
    step = _positive(x.abs().amax(dim=2, keepdim=True)) / _LARGEST_INT4
    return (x / step).round() * step


def _from_minimum(x: torch.Tensor) -> torch.Tensor:
    least, most = x.aminmax(dim=2, keepdim=True)
    step = _positive(most - least) / (2 * _LARGEST_INT4 + 1)
    return ((x - least) / step).round() * step + least


def _from_zero_point(x: torch.Tensor) -> torch.Tensor:
    least, most = x.aminmax(dim=2, keepdim=True)
    step = _positive(most - least) / (2 * _LARGEST_INT4 + 1)
    zero = (-least / step).round()
    return (((x / step).round() + zero).clamp(0, 2 * _LARGEST_INT4 + 1) - zero) * step


def _positive(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, 1.0)


_INT4 = {"one scale": _of_largest, "a scale and a minimum": _from_minimum, "a scale and a zero point": _from_zero_point}


def of_inputs_alone(width: int) -> Iterator[tuple[str, Change]]:
    """Yield what an input [R, I] of so many elements may be quantised to, whatever the weight is in."""
    yield "int8, with one scale for each token", partial(int8, dims=(1,))
    for size in _GROUPS:
        if width % size == 0 and size < width:
            yield f"int8, with one scale for {size} inputs", partial(_int8_in_groups, size=size)
            yield f"int8, with one scale in float16 for {size} inputs", partial(_int8_scaled_in_float16, size=size)


def _int8_scaled_in_float16(x: torch.Tensor, size: int) -> torch.Tensor:
    groups = x.unflatten(1, (-1, size))
    largest = groups.abs().amax(dim=2, keepdim=True)
    scale = _positive(largest) / _LARGEST_INT8
    kept = rounded(scale.to(torch.float32), torch.float16)
    result: torch.Tensor = ((groups / scale).round() * kept).flatten(1)
    return result


def of_inputs() -> Iterator[tuple[str, str, Change]]:
    """Yield what the input [R, I] of a product with a quantised weight may be quantised to.

    The name, the start of the names of the weights that it goes with, and what it makes of the input.
    """
    yield "int8, with one scale for each token", "in int8", partial(int8, dims=(1,))
    name, dtype = name_of(FLOAT8_DTYPES[0]), FLOAT8_DTYPES[0]
    yield f"{name}, with one scale for each token", f"in {name}", partial(float8, dtype=dtype, dims=(1,))
