"""Distances between an actual and an expected tensor, row by row.

All sums are in float64. A NaN equals nothing, not even a NaN, and every one is counted. Definitions:

    max_abs      max |actual - expected|
    relative_l2  ||actual - expected|| / ||expected||
    cosine       <actual, expected> / (||actual|| ||expected||)
    sqnr_db      10 log10(||expected||^2 / ||actual - expected||^2), decibel
    max_ulp      the largest number of representable values of the actual's dtype between the two
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

_BLOCK_ELEMENTS = 1 << 16
"""Elements handled at a time: the float64 copies of a block stay in the second-level cache."""

_ULP_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetrics:
    """Distances of every row of one tap; all float64 tensors [rows], NaN and Inf where the row is not finite."""

    max_abs: torch.Tensor
    worst_index: torch.Tensor
    """Index into the flattened row of the element behind `max_abs`, int64."""
    error_norm: torch.Tensor
    expected_norm: torch.Tensor
    actual_norm: torch.Tensor
    dot: torch.Tensor
    max_ulp: torch.Tensor
    """NaN where the dtype has no ULP distance (float64)."""
    num_nan: int
    num_inf: int

    @property
    def relative_l2(self) -> torch.Tensor:
        """Error norm over expected norm; 0 where both vanish."""
        return _ratio(self.error_norm, self.expected_norm)

    @property
    def cosine(self) -> torch.Tensor:
        """Cosine of the angle; 1 where both vanish."""
        norms = self.actual_norm * self.expected_norm
        return torch.where((norms == 0) & (self.error_norm == 0), 1.0, self.dot / norms)

    @property
    def sqnr_db(self) -> torch.Tensor:
        """Signal to noise ratio in decibel; infinite where the rows are equal."""
        return -20 * torch.log10(self.relative_l2)

    @staticmethod
    def concat(parts: Sequence["RowMetrics"]) -> "RowMetrics":
        """Join the rows of several into one."""
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return RowMetrics(
            **columns, num_nan=sum(part.num_nan for part in parts), num_inf=sum(part.num_inf for part in parts)
        )


_COLUMNS = ("max_abs", "worst_index", "error_norm", "expected_norm", "actual_norm", "dot", "max_ulp")


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    return torch.where((numerator == 0) & (denominator == 0), 0.0, numerator / denominator)


def row_metrics(actual: torch.Tensor, expected: torch.Tensor) -> RowMetrics:
    """Measure `actual` against `expected`, both [rows, ...] of the same shape, any floating dtypes.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    num_rows = actual.shape[0]
    actual, expected = actual.reshape(num_rows, -1), expected.reshape(num_rows, -1)
    step = max(1, _BLOCK_ELEMENTS // max(1, actual.shape[1]))
    starts = range(0, num_rows, step) if num_rows else (0,)
    return RowMetrics.concat([_block_metrics(actual[at : at + step], expected[at : at + step]) for at in starts])


def _block_metrics(actual: torch.Tensor, expected: torch.Tensor) -> RowMetrics:
    a, e = actual.to(torch.float64), expected.to(torch.float64)
    a_norm = torch.linalg.vector_norm(a, dim=1)
    difference = a - e
    if a.shape[1]:
        max_abs, worst = difference.abs().max(dim=1)
    else:
        max_abs, worst = a_norm, torch.zeros_like(a_norm, dtype=torch.int64)
    finite = bool(torch.isfinite(a_norm).all())
    return RowMetrics(
        max_abs=max_abs,
        worst_index=worst,
        error_norm=torch.linalg.vector_norm(difference, dim=1),
        expected_norm=torch.linalg.vector_norm(e, dim=1),
        actual_norm=a_norm,
        dot=torch.linalg.vecdot(a, e, dim=1),
        max_ulp=max_ulp_distance(actual, expected),
        num_nan=0 if finite else int(a.isnan().sum()),
        num_inf=0 if finite else int(a.isinf().sum()),
    )


def max_ulp_distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return, per row of [rows, n], the largest count of representable values between actual and expected (float64).

    The expected values are first rounded to the actual's dtype. NaN in either gives NaN.
    """
    integers = _ULP_INTEGERS.get(actual.dtype)
    if integers is None or not actual.shape[1]:
        return torch.full((actual.shape[0],), torch.nan, dtype=torch.float64, device=actual.device)
    rounded = expected.to(actual.dtype)
    wider = torch.int32 if integers == torch.int16 else torch.int64
    distance = (_ordered(actual, integers, wider) - _ordered(rounded, integers, wider)).abs().amax(dim=1)
    result = distance.to(torch.float64)
    # The sum is a cheap witness of a NaN anywhere in the row; only then is the row looked at again.
    if bool((actual.sum() + rounded.sum()).isnan()):
        result[(actual.isnan() | rounded.isnan()).any(dim=1)] = torch.nan
    return result


def _ordered(x: torch.Tensor, integers: torch.dtype, wider: torch.dtype) -> torch.Tensor:
    """Map floats to integers of the same order, so that neighbours differ by one; both zeros map to 0."""
    bits = x.contiguous().view(integers).to(wider)
    return torch.where(bits < 0, torch.iinfo(integers).min - bits, bits)


@cache
def rounding_unit(dtype: torch.dtype) -> float:
    """Return the RMS relative error of one rounding to `dtype`, measured on a million normal numbers.

    This is the unit in which local errors are given: an operation whose exact result was rounded once scores 1.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 20, generator=generator, dtype=torch.float64)
    if dtype == torch.float64:
        return rounding_unit(torch.float32) * 2.0 ** (24 - 53)
    return float((x.to(dtype).to(torch.float64) - x).norm() / x.norm())


def largest_rounding(dtype: torch.dtype) -> float:
    """Return the largest relative error one rounding to `dtype` can make, in units of `rounding_unit` (about 2.3)."""
    return torch.finfo(dtype).eps / 2 / rounding_unit(dtype)


def logit_metrics(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return [3, rows] float64 for logits [rows, vocabulary]: top-1 agreement (0 or 1), KL divergence, margin.

    The divergence is KL(expected || actual) of the two softmax distributions, in nats; the margin is the distance
    between the expected row's two largest logits.
    """
    agreement, divergence, margin = [], [], []
    for ours, theirs in zip(actual.split(64), expected.split(64), strict=True):
        a, e = ours.to(torch.float64), theirs.to(torch.float64)
        log_p, log_q = e.log_softmax(dim=-1), a.log_softmax(dim=-1)
        divergence.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
        best = e.topk(min(2, e.shape[-1]), dim=-1).values
        margin.append(best[:, 0] - best[:, -1])
        agreement.append((a.argmax(dim=-1) == e.argmax(dim=-1)).to(torch.float64))
    return torch.stack([torch.cat(agreement), torch.cat(divergence), torch.cat(margin)])
