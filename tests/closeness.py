"""How near two results of one formula are that came from other shapes, batches, numbers of threads or kernels.

A sum of n terms in two orders differs by at most n roundings of the sum of the terms' magnitudes. No test adds more than
`TERMS` in one sum; the sums of tiny models are shorter. What is the same computation on the same shape is compared with
`==` and `torch.equal`, and not with this.
"""

from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch

from harness.metrics import rounding_unit

TERMS = 256


def rtol(dtype: torch.dtype) -> float:
    """Return what two orders of a sum may differ by, in units of the sum of its terms' magnitudes."""
    return TERMS * torch.finfo(dtype).eps


def assert_near(actual: torch.Tensor, expected: torch.Tensor, message: str | None = None) -> None:
    """Compare two tensors of one dtype; an element may be small beside the terms that it is the sum of."""
    limit = rtol(expected.dtype)
    largest = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit * largest, msg=message)


def near(expected: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return what `==` compares a float with, or a list of floats or a mapping to floats."""
    return pytest.approx(expected, rel=rtol(dtype), abs=0)


def near_roundings(expected: Any, dtype: torch.dtype) -> Any:
    """Return what `==` compares local errors with: a float, or a record some of whose fields are floats.

    They are counted in roundings of the engine's dtype. Two truths in float64 lie some roundings of float64 apart,
    which is the same distance at each size of the error.
    """
    limit = rtol(torch.float64)
    if is_dataclass(expected) and not isinstance(expected, type):
        fields = {name: getattr(expected, name) for name in expected.__dataclass_fields__}
        return replace(
            expected,
            **{name: near_roundings(value, dtype) for name, value in fields.items() if isinstance(value, float)},
        )
    return pytest.approx(expected, rel=limit, abs=limit / rounding_unit(dtype))
