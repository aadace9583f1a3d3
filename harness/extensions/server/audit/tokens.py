"""What the drawn tokens exclude.

If a hypothesis is true, the ratio of any other distribution's likelihood to its own has a mean of one, draw after draw:
it ever exceeds 1/a with a probability of a at most (Ville 1939). So does the mean of several such ratios. A hypothesis
is excluded at the first draw where the mean over its rivals exceeds 1/a: the other hypotheses, and itself at other
temperatures.

Shapes: H hypotheses, N draws, T temperatures, K kept rows, V vocab.
"""

import math
from collections.abc import Sequence

import torch

from harness.extensions.server.audit.views import View
from harness.extensions.server.sampler.evidence import NOISE_MARGIN

DEVIATIONS = 2.33
"""In 99 of 100 audits a sum of log ratios is at least its mean, less so many standard deviations."""


def excluded_after(views: Sequence[View], alpha: float) -> list[int | None]:
    """Return after how many draws each hypothesis is excluded; None: it is not.

    A rival that is within rounding of a hypothesis is none: it would be evidence of rounding. The views are of the same
    draws. A true hypothesis is excluded with a probability of at most `alpha`.
    """
    own_HN = torch.stack([view.own for view in views]).cumsum(dim=-1)
    found: list[int | None] = []
    for at, view in enumerate(views):
        rivals = [other for other in range(len(views)) if other != at and is_told(views[other], view)]
        most_N = view.most.cumsum(dim=-1)
        parts = [_mean_of_ratios(view.tempered.cumsum(dim=-1) - most_N)]
        if rivals:
            parts.append(_mean_of_ratios(own_HN[rivals] - most_N))
        evidence_N = _mean_of_ratios(torch.stack(parts))
        beyond = (evidence_N >= -math.log(alpha)).nonzero()
        found.append(int(beyond[0]) + 1 if len(beyond) else None)
    return found


def _mean_of_ratios(logs: torch.Tensor) -> torch.Tensor:
    return logs.logsumexp(dim=0) - math.log(len(logs))


def is_told(served: View, other: View) -> bool:
    """Whether two hypotheses differ by more than rounding does, as the first one's draws see it."""
    mean, _ = _moments(served, other)
    noise = max(float(view.noise.mean()) for view in (served, other))
    return mean > NOISE_MARGIN**2 * noise


def num_needed(served: View, other: View, alpha: float, num_hypotheses: int) -> float | None:
    """Return how many draws of one hypothesis exclude another one in 99 of 100 audits; None: no number does."""
    if not is_told(served, other):
        return None
    mean, variance = _moments(served, other)
    threshold = math.log(2 * max(1, num_hypotheses - 1) / alpha)
    root = DEVIATIONS * math.sqrt(variance)
    return ((root + math.sqrt(root**2 + 4 * mean * threshold)) / (2 * mean)) ** 2


def _moments(served: View, other: View) -> tuple[float, float]:
    """Return mean and variance of the log ratio of a draw, over the rows that are kept whole."""
    p_KV = torch.stack([served.whole[at][0] for at in sorted(served.whole)]).double()
    most_KV = torch.stack([other.whole[at][1] for at in sorted(other.whole)]).double()
    ratios_KV = p_KV.clamp(min=torch.finfo(torch.float64).tiny).log() - most_KV
    mean_K = (p_KV * ratios_KV).sum(dim=-1)
    variance_K = (p_KV * ratios_KV**2).sum(dim=-1) - mean_K**2
    return float(mean_K.mean()), float(variance_K.clamp(min=0).mean())
