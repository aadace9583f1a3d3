"""How near two results of one formula are that came from other shapes, batches, numbers of threads or kernels.

A sum of n terms in two orders differs by at most n roundings of the sum of the terms' magnitudes. The sums of tiny
models have `TERMS` terms at most. What is the same computation on the same shape is compared with `==` and
`torch.equal`, and not with this.
"""

from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch

from harness.base.metrics import rounding_unit

TERMS = 256


def rtol(dtype: torch.dtype) -> float:
    """Return what two orders of a sum may differ by, in units of the sum of its terms' magnitudes."""
    return TERMS * torch.finfo(dtype).eps


def assert_near(actual: torch.Tensor, expected: torch.Tensor, message: str | None = None) -> None:
    """Compare two tensors of one dtype; an element may be small beside the terms that it is the sum of."""
    limit = rtol(expected.dtype)
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * largest, msg=message)


def near(expected: Any, dtype: torch.dtype = torch.float64, *, absolute: float = 0.0) -> Any:
    """Return what `==` compares floats with: one, a list of them, or a record some of whose fields are floats.

    Args:
        expected: what to compare with.
        dtype: in which it was computed.
        absolute: what it may be off by whatever its size.
    """
    if is_dataclass(expected) and not isinstance(expected, type):
        values = {name: getattr(expected, name) for name in expected.__dataclass_fields__}
        floats = {name: value for name, value in values.items() if isinstance(value, float)}
        return replace(expected, **{name: near(value, dtype, absolute=absolute) for name, value in floats.items()})
    return pytest.approx(expected, rel=rtol(dtype), abs=absolute)


def near_roundings(expected: Any, dtype: torch.dtype) -> Any:
    """Return what `==` compares local errors with, which are counted in roundings of the engine's dtype.

    Two truths in float64 lie some roundings of float64 apart, which is the same distance at each size of the error.
    """
    return near(expected, absolute=rtol(torch.float64) / rounding_unit(dtype))
