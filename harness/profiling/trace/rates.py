"""The FLOP and memory rates that kernels reached, for operators whose shapes determine the work.

Operators that are not in the tables below have no rate. The work of a look-up, for example, does not follow from the
shapes of its inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.base.files import parse_json
from harness.profiling.gpus import Gpu, reported_gpu
from harness.profiling.trace.columns import Trace
from harness.profiling.trace.device import is_of_device, launch_of
from harness.profiling.trace.nesting import NOT_NESTED, innermost, nest
from harness.results.trace import TraceRate

_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1), "mkldnn::_linear_pointwise": (0, 1),
}  # fmt: skip
"""Matrix products, with the indices of the two multiplied arguments."""


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


_ELEMENTWISE = _aten(
    "add sub mul div pow neg exp rsqrt sqrt reciprocal sin cos tanh sigmoid silu gelu relu clamp where masked_fill"
    " _softmax _log_softmax clone maximum minimum"
)
"""Operators whose result has the broadcast shape of all inputs, and the dtype of the first."""
_IN_PLACE = frozenset(["aten::copy_", *(f"{name}_" for name in _ELEMENTWISE)])
"""Operators that write into the first input; `copy_` does not read it."""
_SCANS = _aten("sort cumsum")
"""Operators whose result is as large as the first input."""
_REDUCTIONS = _aten("mean sum amax amin max argmax topk")
"""Operators with a small result, which is not counted."""
_ATTENTION = _aten(
    "_flash_attention_forward _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention"
    " _scaled_dot_product_efficient_attention _efficient_attention_forward"
)
"""Operators that take query, key and value first; the result is as large as the query. A mask changes their work."""
_KNOWN = _PRODUCTS.keys() | _ELEMENTWISE | _IN_PLACE | _SCANS | _REDUCTIONS | _ATTENTION
_ITEMSIZES = {
    "double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2": 1,
}  # fmt: skip
_PEAKS = {"float": "float32", "c10::BFloat16": "bfloat16", "c10::Half": "float16"}
"""The dtype of a product by the name of its inputs' dtype."""
_MOST = 2**63
"""Upper limit of the operations and of the bytes of a call."""
_Shape = tuple[int, ...]


class _Inputs(NamedTuple):
    """Of one call; equal ones are one row."""

    shapes: tuple[_Shape, ...]
    dtypes: tuple[str, ...]
    """Empty if they are not known."""
    num_stored: tuple[int, ...]
    """Elements of each input that are in memory."""


@dataclass(slots=True)
class _Total:
    count: int = 0
    time_ns: int = 0


def measured_rates(trace: Trace) -> tuple[TraceRate, ...]:
    """Return the rates of the operators whose shapes the trace has (`record_shapes=True`), the longest first.

    A kernel counts for the innermost of these operators that launched it. Calls without a kernel are left out: they
    computed on the CPU, or the trace ends before their kernel. If the trace has no kernels at all, the time is the
    operator's.
    """
    is_known = trace.are(lambda _, name: name in _KNOWN)
    has_device = bool(trace.are(is_of_device).any())
    time_ns = _kernel_ns(trace, is_known) if has_device else trace.duration_ns
    totals: dict[tuple[str, _Inputs | None], _Total] = {}
    read = {number: _read_inputs(*trace.inputs[number]) for number in np.unique(trace.input[is_known]).tolist()}
    for event in np.flatnonzero(is_known & (trace.input > 0) & (time_ns > 0)).tolist():
        total = totals.setdefault((trace.name_of(event), read[int(trace.input[event])]), _Total())
        total.count += 1
        total.time_ns += int(time_ns[event])
    gpu = _card(trace)
    rates = [_rate(name, inputs, total, gpu, has_device) for (name, inputs), total in totals.items() if inputs]
    return tuple(sorted((rate for rate in rates if rate), key=lambda rate: rate.time_us, reverse=True))


def _card(trace: Trace) -> Gpu | None:
    """Return the GPU of the trace; None if unknown, or if there are several kinds."""
    names = set(trace.device_names)
    return reported_gpu(names.pop()) if len(names) == 1 else None


def _kernel_ns(trace: Trace, is_known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the time of the kernels that each event launched."""
    kernels = np.flatnonzero(trace.are(is_of_device))
    launch = launch_of(trace, kernels)
    kernels, launch = kernels[launch >= 0], launch[launch >= 0]
    kernel_ns = np.zeros(len(trace.label), np.int64)
    if len(kernels):
        events = np.unique(np.concatenate([np.flatnonzero(is_known), launch]))
        around = innermost(nest(trace, events), is_known)[launch]
        inside = around != NOT_NESTED
        np.add.at(kernel_ns, around[inside], trace.duration_ns[kernels[inside]])
    return kernel_ns


def _read_inputs(shapes: str, dtypes: str, strides: str) -> _Inputs | None:
    """Return the inputs of a call; None if they cannot be read."""
    dims, names, steps = map(_listed, (shapes, dtypes, strides))
    if not dims:
        return None
    inputs = tuple(map(_shape, dims))
    all_steps = map(_shape, steps) if len(steps) == len(dims) else repeat(())
    is_typed = len(names) == len(dims)
    return _Inputs(inputs, tuple(map(str, names if is_typed else ())), tuple(map(_num_stored, inputs, all_steps)))


def _listed(text: str) -> list[object]:
    """Return a list of the file; empty where it has none, or something else in its place."""
    try:
        items = parse_json(text)
    except ValueError:
        return []
    return items if isinstance(items, list) else []


def _shape(dims: object) -> _Shape:
    """Return a tensor's shape; empty for a number, for None, and for a list of tensors."""
    is_shape = isinstance(dims, list) and all(isinstance(dim, int) for dim in dims)
    return tuple(dims) if is_shape else ()  # type: ignore[arg-type]


def _num_stored(shape: _Shape, strides: _Shape) -> int:
    """Return the elements of a tensor in memory: where it is expanded, or its rows overlap, fewer than it has."""
    if len(shape) != len(strides):
        return prod(shape)
    extent = 1 + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    return max(0, min(prod(dim for dim, stride in zip(shape, strides, strict=True) if stride), extent))


def _rate(name: str, inputs: _Inputs, total: _Total, gpu: Gpu | None, has_device: bool) -> TraceRate | None:
    try:
        result, flops = _result(name, inputs.shapes)
    except (ValueError, IndexError):
        return None
    num_bytes = _num_bytes(name, inputs, result)
    is_possible = min(map(min, filter(None, inputs.shapes)), default=0) >= 0 and max(flops, num_bytes) < _MOST
    if not is_possible or not (flops or num_bytes):
        return None
    used = inputs.dtypes[_PRODUCTS[name][0]] if name in _PRODUCTS and inputs.dtypes else ""
    dtype = "float8" if used.startswith("c10::Float8") else _PEAKS.get(used, "")
    return TraceRate(
        name=name,
        shapes=" ".join(str(list(dims)) for dims in inputs.shapes if dims),
        count=total.count,
        time_us=total.time_ns / 1e3,
        flops=total.count * flops,
        num_bytes=total.count * num_bytes,
        has_device=has_device,
        peak_flops_per_s=gpu.flops_per_s.get(dtype) if gpu else None,
        peak_bytes_per_s=gpu.bytes_per_s if gpu else None,
    )


def _num_bytes(name: str, inputs: _Inputs, result: _Shape) -> int:
    """Return the bytes of the inputs and the result; 0 if the dtype of a tensor is not known."""
    read = list(zip(inputs.shapes, inputs.dtypes, inputs.num_stored, strict=False))[: 3 if name in _ATTENTION else None]
    if not inputs.dtypes or not all(dtype in _ITEMSIZES for shape, dtype, _ in read if shape):
        return 0
    like = inputs.dtypes[_PRODUCTS[name][0] if name in _PRODUCTS else 0]
    num_read = sum(num * _ITEMSIZES[dtype] for shape, dtype, num in read[1 if name == "aten::copy_" else 0 :] if shape)
    return num_read + (prod(result) * _ITEMSIZES.get(like, 0) if result else 0)


def _result(name: str, inputs: Sequence[_Shape]) -> tuple[_Shape, int]:
    """Return the shape of the result, and the floating-point operations."""
    if name in _PRODUCTS:
        left, right = (inputs[place] for place in _PRODUCTS[name])
        width = right[0] if name.startswith("mkldnn") else right[-1]
        return (*left[:-1], width), 2 * prod(left) * width
    if name in _ELEMENTWISE:
        return np.broadcast_shapes(*(dims for dims in inputs if dims)), 0
    return () if name in _REDUCTIONS else inputs[0], 0
