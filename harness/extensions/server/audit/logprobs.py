"""What the server's log probabilities exclude.

Where a hypothesis is true, the server's values are its own and a rounding error. The error has no reason to point to
another hypothesis: along the difference of the two, summed over a request, positive and negative errors are equally
likely. For such sums S of independent requests, sum(S) / sqrt(sum(S^2)) exceeds t with a probability of at most
exp(-t^2 / 2) (Efron 1969). A hypothesis is excluded where that happens and the values are nearer the other one.

Shapes: M values, R requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from harness.extensions.server.audit.tokens import DEVIATIONS
from harness.extensions.server.audit.views import View
from harness.extensions.server.endpoint.judge import bounds
from harness.extensions.server.sampler.result import DefinitionResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """All log probabilities of a server."""

    values: torch.Tensor
    """[M] float64"""
    rows: torch.Tensor
    """[M] int64: the draw that each is of."""
    requests: torch.Tensor
    """[M] int64: from zero on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HypothesisValues:
    """A hypothesis's values under one reading."""

    at: int
    """Number of the hypothesis."""
    name: str
    exact: torch.Tensor
    """[M] float64"""
    rounded: torch.Tensor
    """[M] float64"""


def readings_of(views: Sequence[View]) -> list[HypothesisValues]:
    """Return all readings of all hypotheses."""
    return [
        HypothesisValues(at=at, name=name, exact=_flat(own.exact), rounded=_flat(own.rounded))
        for at, view in enumerate(views)
        for name, own in view.readings.items()
    ]


def _flat(values: Mapping[int, list[float]]) -> torch.Tensor:
    return torch.tensor([value for at in sorted(values) for value in values[at]], dtype=torch.float64)


def is_excluded(own: HypothesisValues, others: Sequence[HypothesisValues], given: Given, alpha: float) -> bool:
    """Whether the values are another hypothesis's rather than those of one reading.

    `others` are readings of other hypotheses. A true one is excluded with a probability of at most `alpha`.
    """
    threshold = _threshold(alpha, len(others))
    for other in others:
        toward, distance, _ = _sums(own, other, given)
        if 2 * toward.sum() > distance.sum() and toward.sum() > threshold * toward.square().sum().sqrt():
            return True
    return False


def num_needed(
    served: HypothesisValues, other: HypothesisValues, given: Given, alpha: float, num_readings: int
) -> float | None:
    """Return how many requests exclude a reading in 99 of 100 audits if another one is served; None: no number does.

    The error is taken to be as large as HF's own.
    """
    _, distance, noise = _sums(other, served, given)
    if not distance.sum() > 0:
        return None
    share = float((distance + noise).square().mean().sqrt() / distance.mean())
    sum_needed = _threshold(alpha, num_readings) + DEVIATIONS  # its own deviation is about one
    return (share * sum_needed) ** 2 if 2 * noise.sum().abs() < distance.sum() else None


def _threshold(alpha: float, num_directions: int) -> float:
    return math.sqrt(2 * math.log(max(1, num_directions) / alpha))


def _sums(
    own: HypothesisValues, other: HypothesisValues, given: Given
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [R] three times: the error along the difference, the difference's own square, and HF's error along it.

    Rows in which HF errs more count less.
    """
    usable = own.exact.isfinite() & other.exact.isfinite()
    difference = torch.where(usable, other.exact - own.exact, 0.0)
    error = torch.where(usable, given.values - own.exact, 0.0)
    noises = [torch.where(usable & item.rounded.isfinite(), item.rounded - item.exact, 0.0) for item in (own, other)]
    least = torch.finfo(torch.float32).eps * own.exact.masked_fill(~usable, 0.0)
    squares = torch.stack([*noises, least]).square().sum(dim=0)
    squares = torch.zeros(int(given.rows.max()) + 1).double().index_add(0, given.rows, squares)
    weight = 1 / (squares + squares.mean()).clamp(min=1e-24)[given.rows]
    zeros = torch.zeros(int(given.requests.max()) + 1).double()
    return (
        zeros.index_add(0, given.requests, weight * error * difference),
        zeros.index_add(0, given.requests, weight * difference.square()),
        zeros.index_add(0, given.requests, weight * noises[0] * difference),
    )


def fit_of(own: HypothesisValues, given: Given) -> DefinitionResult:
    """Return how well a reading fits: by the error over the error that HF makes in the server's dtype."""
    is_there = own.exact.isfinite()
    rms_bound, max_bound = bounds(int(given.rows.max()) + 1)
    error = (given.values - own.exact)[is_there]
    least = torch.finfo(torch.float32).eps * own.exact[is_there].abs().clamp(min=1.0)
    noise = torch.maximum((own.rounded - own.exact)[is_there].nan_to_num(posinf=0.0, neginf=0.0).abs(), least)
    return DefinitionResult(
        name=own.name,
        num_values=len(error),
        num_misfits=int((~is_there & ~own.rounded.isfinite()).sum()),
        rms_ratio=float(error.square().mean().sqrt() / noise.square().mean().sqrt()),
        max_ratio=float(error.abs().max() / noise.max()),
        rms_bound=rms_bound,
        max_bound=max_bound,
    )
