"""Matrix products of a trace by their shapes, with what they reach: on a GPU by the time of their kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.base.json_text import parse_json
from harness.profiling.trace.device import is_of_device, launch_of
from harness.profiling.trace.file import Trace
from harness.profiling.trace.nesting import NOT_NESTED, innermost, nest
from harness.results.trace import TraceProduct

_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1), "mkldnn::_linear_pointwise": (0, 1),
}  # fmt: skip
"""The two arguments that are multiplied."""


def matrix_products(trace: Trace) -> tuple[TraceProduct, ...]:
    """Return the products whose shapes the trace has (`record_shapes=True`), those that take longest first."""
    is_product = trace.are(lambda _, name: name in _PRODUCTS)
    events = np.flatnonzero(is_product & (trace.shape > 0))
    if not len(events):
        return ()
    kernel_ns = _kernel_ns(trace, is_product)
    sums: dict[tuple[str, str], list[float]] = {}
    for event in events.tolist():
        key = trace.name_of(event), trace.shapes[trace.shape[event]]
        own = sums.setdefault(key, [0, 0, 0])
        own[0] += 1
        own[1] += int(trace.duration_ns[event])
        own[2] += int(kernel_ns[event])
    has_device = bool(kernel_ns.any())
    found = [_product(name, shapes, own, has_device) for (name, shapes), own in sums.items()]
    return tuple(sorted((one for one in found if one), key=lambda one: one.time_us, reverse=True))


def _kernel_ns(trace: Trace, is_product: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each event the time of the kernels that were launched in it."""
    kernels = np.flatnonzero(trace.are(is_of_device))
    launch = launch_of(trace, kernels)
    kernels, launch = kernels[launch >= 0], launch[launch >= 0]
    found = np.zeros(len(trace.label), np.int64)
    if len(kernels):
        events = np.unique(np.concatenate([np.flatnonzero(is_product), launch]))
        around = innermost(nest(trace, events), is_product)[launch]
        inside = around != NOT_NESTED
        np.add.at(found, around[inside], trace.duration_ns[kernels[inside]])
    return found


def _product(name: str, shapes: str, own: Sequence[float], has_device: bool) -> TraceProduct | None:
    flops = _flops(name, shapes)
    if flops is None:
        return None
    count, cpu_ns, kernel_ns = own
    time_us = (kernel_ns if has_device else cpu_ns) / 1e3
    return TraceProduct(
        name=name, shapes=shapes, count=int(count), time_us=time_us, flops=int(count) * flops, has_device=has_device
    )


def _flops(name: str, shapes: str) -> int | None:
    """Return 2 for each element of the result and of the inner dimension; None for shapes that are no product."""
    try:
        dims: list[Any] = parse_json(shapes)
        left, right = (dims[place] for place in _PRODUCTS[name])
        width = right[0] if name.startswith("mkldnn") else right[-1]
        return int(2 * np.prod(left, dtype=np.int64) * width)
    except (ValueError, IndexError, TypeError, OverflowError, KeyError):
        return None
