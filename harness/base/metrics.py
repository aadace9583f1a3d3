"""Distances between an actual and an expected tensor, row by row.

All sums are in float64. A NaN equals nothing, not even a NaN, and every one is counted. Definitions:

    max_abs      max |actual - expected|
    relative_l2  ||actual - expected|| / ||expected||
    cosine       <actual, expected> / (||actual|| ||expected||)
    sqnr_db      10 log10(||expected||^2 / ||actual - expected||^2), decibel
    max_ulp      max |actual - expected| / ulp(expected), with the ulp of the actual's dtype (Muller et al., Handbook of
                 Floating-Point Arithmetic, section 2.6); fractional, since the expected side is finer than the dtype

With d = actual - expected, <actual, expected> is taken as ||expected||^2 + <d, expected>, which does not cancel where
the two are near.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

_BLOCK_ELEMENTS = 1 << 16
"""Elements handled at a time: the float64 copies of a block stay in the second-level cache."""

_EXPONENT_BITS = 0x7FF0_0000_0000_0000
"""Of a float64: what is left of a number is the power of two at or below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetrics:
    """Distances of every row of one tap; float64 tensors [rows], NaN or Inf where the row is not finite."""

    max_abs: torch.Tensor
    max_ulp: torch.Tensor
    error_norm: torch.Tensor
    expected_norm: torch.Tensor
    actual_norm: torch.Tensor
    error_dot: torch.Tensor
    """<actual - expected, expected>."""
    is_finite: torch.Tensor
    """bool: every element of the actual row is finite."""
    worst_index: torch.Tensor
    """int64: index into the flattened row of the element behind `max_abs`; -1 but for the worst row of every block."""
    num_nan: int
    """NaN among the actual elements."""
    num_inf: int
    is_estimated: bool = False
    """Whether norms are estimates and no element is known: `max_abs` and `max_ulp` are NaN, `worst_index` -1."""

    @property
    def relative_l2(self) -> torch.Tensor:
        """Error norm over expected norm; 0 if both vanish."""
        return torch.where(
            (self.error_norm == 0) & (self.expected_norm == 0), 0.0, self.error_norm / self.expected_norm
        )

    @property
    def cosine(self) -> torch.Tensor:
        """Cosine of the angle; 1 where both vanish, NaN where one does."""
        norms = self.actual_norm * self.expected_norm
        cosine = ((self.expected_norm.square() + self.error_dot) / norms).clamp(-1, 1)
        both_vanish = (self.actual_norm == 0) & (self.expected_norm == 0)
        return torch.where(both_vanish, 1.0, torch.where(norms == 0, torch.nan, cosine))

    @property
    def sqnr_db(self) -> torch.Tensor:
        """Signal to noise ratio in decibel; infinite where the rows are equal."""
        return -20 * torch.log10(self.relative_l2)

    def select(self, at: torch.Tensor) -> "RowMetrics":
        """Return some rows, all of whose elements are numbers."""
        columns = {name: getattr(self, name)[at] for name in _COLUMNS}
        return RowMetrics(**columns, num_nan=0, num_inf=0, is_estimated=self.is_estimated)

    @staticmethod
    def concat(parts: Sequence["RowMetrics"]) -> "RowMetrics":
        """Join the rows of several into one."""
        columns = {name: torch.cat([getattr(part, name) for part in parts]) for name in _COLUMNS}
        return RowMetrics(
            **columns,
            num_nan=sum(part.num_nan for part in parts),
            num_inf=sum(part.num_inf for part in parts),
            is_estimated=any(part.is_estimated for part in parts),
        )


_COLUMNS = ("max_abs", "max_ulp", "error_norm", "expected_norm", "actual_norm", "error_dot", "is_finite", "worst_index")


def row_metrics(actual: torch.Tensor, expected: torch.Tensor) -> RowMetrics:
    """Measure `actual` against `expected`, both [rows, ...] of the same shape, any floating dtypes.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: actual {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    num_rows = actual.shape[0]
    actual, expected = (x[:, None] if x.dim() == 1 else x.flatten(1) for x in (actual, expected))
    step = max(1, _BLOCK_ELEMENTS // max(1, actual.shape[1]))
    starts = range(0, num_rows, step) if num_rows else (0,)
    return RowMetrics.concat([_block_metrics(actual[at : at + step], expected[at : at + step]) for at in starts])


def _block_metrics(actual: torch.Tensor, expected: torch.Tensor) -> RowMetrics:
    e = expected.to(torch.float64)
    expected_norm = torch.linalg.vector_norm(e, dim=1)
    is_same = actual.dtype == expected.dtype and torch.equal(actual, expected)
    if not actual.numel() or (is_same and bool(torch.isfinite(expected_norm).all())):
        return _equal_rows(expected_norm)
    a = actual.to(torch.float64)
    difference = a - e
    error_norm = torch.linalg.vector_norm(difference, dim=1)
    error_dot = torch.linalg.vecdot(difference, e, dim=1)
    magnitude = difference.abs_()
    max_abs = magnitude.amax(dim=1)
    worst_index = torch.full_like(max_abs, -1, dtype=torch.int64)
    worst = int(max_abs.argmax())
    worst_index[worst] = magnitude[worst].argmax()
    is_finite, num_nan, num_inf = torch.ones_like(max_abs, dtype=torch.bool), 0, 0
    if not bool(torch.isfinite(error_norm).all()):
        is_finite = torch.isfinite(actual).all(dim=1)
        num_nan, num_inf = int(actual.isnan().sum()), int(actual.isinf().sum())
    return RowMetrics(
        max_abs=max_abs,
        max_ulp=magnitude.div_(_ulps(e, actual.dtype)).amax(dim=1),
        error_norm=error_norm,
        expected_norm=expected_norm,
        actual_norm=torch.linalg.vector_norm(a, dim=1),
        error_dot=error_dot,
        is_finite=is_finite,
        worst_index=worst_index,
        num_nan=num_nan,
        num_inf=num_inf,
    )


def _equal_rows(expected_norm: torch.Tensor) -> RowMetrics:
    zero = torch.zeros_like(expected_norm)
    return RowMetrics(
        max_abs=zero,
        max_ulp=zero,
        error_norm=zero,
        expected_norm=expected_norm,
        actual_norm=expected_norm,
        error_dot=zero,
        is_finite=torch.ones_like(zero, dtype=torch.bool),
        worst_index=torch.full_like(zero, -1, dtype=torch.int64),
        num_nan=0,
        num_inf=0,
    )


def _ulps(e: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the distance between neighbours of `dtype` at each element of `e` (float64)."""
    info = torch.finfo(dtype)
    powers = e.view(torch.int64).bitwise_and(_EXPONENT_BITS).view(torch.float64)
    return powers.clamp_(min=info.smallest_normal).mul_(info.eps)


def row_errors(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ||actual - expected|| / ||expected|| of every row, [rows] float64: 0 if both vanish.

    Computed in the finer dtype of the two, which for a norm is enough; rows whose squares leave its range are computed
    in float64. A row that is not finite gives NaN or Inf.
    """
    actual, expected = (x[:, None] if x.dim() == 1 else x.flatten(1) for x in (actual, expected))
    finer = torch.promote_types(actual.dtype, expected.dtype)
    step = max(1, _BLOCK_ELEMENTS // max(1, actual.shape[1]))
    starts = range(0, len(actual), step)
    parts = [_norms(actual[at : at + step], expected[at : at + step], finer) for at in starts]
    if not parts:
        return torch.empty(0, dtype=torch.float64)
    error, norm = (torch.cat(column) for column in zip(*parts, strict=True))
    return torch.where((error == 0) & (norm == 0), 0.0, error / norm)


def _norms(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norms of error and expected row, [rows] float64."""
    e = expected.to(dtype)
    pair = torch.linalg.vector_norm(actual.to(dtype) - e, dim=1), torch.linalg.vector_norm(e, dim=1)
    error, norm = (x.to(torch.float64) for x in pair)
    if dtype != torch.float64:
        tiny, huge = torch.finfo(dtype).smallest_normal ** 0.5, torch.finfo(dtype).max ** 0.5
        is_inside = ((error == 0) | (error > tiny)) & (error < huge) & (norm > tiny) & (norm < huge)
        if not bool(is_inside.all()):
            outside = ~is_inside
            error[outside], norm[outside] = _norms(actual[outside], expected[outside], torch.float64)
    return error, norm


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
        is_number = ~(a.isnan().any(dim=-1) | e.isnan().any(dim=-1))
        agreement.append((is_number & (a.argmax(dim=-1) == e.argmax(dim=-1))).to(torch.float64))
    return torch.stack([torch.cat(agreement), torch.cat(divergence), torch.cat(margin)])
