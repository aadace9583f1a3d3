"""How a server's tokens and log probabilities exclude hypotheses.

Tokens: if a hypothesis is true, the ratio of any rival distribution's likelihood to its own has a mean of one, draw
after draw. The ratio ever exceeds 1/a with a probability of a at most (Ville 1939), and so does the mean of several
ratios. A hypothesis is excluded at the first draw where the mean over its rivals exceeds 1/a: the rest of the
hypotheses, and itself at different temperatures.

Log probabilities: if a hypothesis is true, the server's values are its own and a rounding error. The error does not
point to a rival: along the difference of the two, summed over a request, positive and negative errors are equally
likely. For such sums S of independent requests, sum(S) / sqrt(sum(S^2)) exceeds t with a probability of at most
exp(-t^2 / 2) (Efron 1969). A hypothesis is excluded where that happens and the values are nearer to the rival.

Shapes: H hypotheses, N draws, T temperatures, K kept rows, V vocab, M values, R requests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.extensions.server.logprobs import DefinitionResult, LogprobErrors, is_number
from harness.extensions.server.sampler.evidence import LEAST, NOISE_MARGIN, RESOLUTION, SHARE, Draw
from harness.extensions.server.sampler.logprobs import Definition
from harness.oracle.sampling import Chain, SamplingSettings

_TEMPERATURES = (0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5)
"""A hypothesis is compared with itself at these, relative to its own: what is served may be none of the list."""
DEVIATIONS = 2.33
"""In 99 of 100 audits a sum of log ratios is at least its mean, less so many standard deviations."""

RowLogprobs = dict[int, float | None]
"""Log probabilities of one row by token."""


@dataclass(slots=True)
class Values:
    """Log probabilities of the tokens that the server named, under one definition of what they are of."""

    exact: dict[int, list[float]] = field(default_factory=dict)
    """Of each draw, by the truth."""
    rounded: dict[int, list[float]] = field(default_factory=dict)
    """The same by HF in the server's dtype."""


class View:
    """What one hypothesis says of all draws: how likely each is, and the log probabilities of named tokens."""

    def __init__(self, settings: SamplingSettings, num_draws: int, *, every: int) -> None:
        """Draw with these settings, and keep each `every`-th row whole."""
        self.settings, self.every = settings, every
        self.most = torch.zeros(num_draws).double()
        """[N] Logarithm of the largest probability that rounding leaves a draw: no single one excludes."""
        self.log_p = torch.zeros_like(self.most)
        """[N] The same of the probability, a share of it spread over all tokens."""
        self.tempered = torch.zeros(len(_TEMPERATURES), num_draws).double()
        """[T, N] as `log_p`, at the other temperatures."""
        self.noise = torch.zeros_like(self.most)
        """[N] KL between the model's distributions by the truth and by HF in the server's dtype, in nats."""
        self.readings: dict[str, Values] = {}
        self.whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of some draws all probabilities, and logarithms of the largest ones, [V] float32."""

    def add(self, at: int, draw: Draw, logprobs: RowLogprobs, logits: torch.Tensor, control: torch.Tensor) -> None:
        """Add one draw.

        `logprobs` are the server's of this row. `logits` are the truth's and `control` those of HF in the server's
        dtype, both [V] float64.
        """
        chain, ids = Chain(), list(draw.token_ids)
        exact, noisy = logits.log_softmax(dim=-1), control.log_softmax(dim=-1)
        plain = exact.exp()
        slack = max(NOISE_MARGIN * float((exact - noisy)[plain > SHARE].abs().max()), RESOLUTION)
        p = chain.probabilities(logits, self.settings, draw.past)
        rounded = chain.probabilities(control, self.settings, draw.past)
        possible = chain.probabilities(logits, self.settings, draw.past, slack=slack)
        most = torch.maximum(torch.maximum(p, possible), SHARE * plain).clamp(min=LEAST)
        tempered_TV = torch.stack([(p.log() / temperature).softmax(dim=-1) for temperature in _TEMPERATURES])
        self.most[at] = most[ids].sum().log()
        self.log_p[at] = _spread(p, plain)[ids].sum().log()
        self.tempered[:, at] = _spread(tempered_TV, plain)[:, ids].sum(dim=-1).log()
        self.noise[at] = (plain * (exact - noisy)).sum()
        if at % self.every == 0:
            self.whole[at] = (p.float(), most.log().float())
        self._add_values(at, logprobs, Definition.RAW, exact, noisy)
        if self.settings.changed:
            self._add_values(at, logprobs, Definition.PROCESSED, p.log(), rounded.log())

    def _add_values(
        self, at: int, logprobs: RowLogprobs, reading: Definition, exact: torch.Tensor, rounded: torch.Tensor
    ) -> None:
        values, ids = self.readings.setdefault(reading.value, Values()), comparable_tokens(logprobs)
        values.exact[at], values.rounded[at] = exact[ids].tolist(), rounded[ids].tolist()


def comparable_tokens(logprobs: RowLogprobs) -> list[int]:
    """Return the tokens with a log probability that can be compared."""
    return [token_id for token_id, value in sorted(logprobs.items()) if is_number(value)]


def _spread(p: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    return (1 - SHARE) * p + SHARE * plain


def excluded_after(views: Sequence[View], alpha: float) -> list[int | None]:
    """Return after how many draws each hypothesis is excluded; None: it is not.

    A rival that is within rounding of a hypothesis is none: it would be evidence of rounding. The views are of the same
    draws. A true hypothesis is excluded with a probability of at most `alpha`.
    """
    log_p_HN = torch.stack([view.log_p for view in views]).cumsum(dim=-1)
    exclusions: list[int | None] = []
    for at, view in enumerate(views):
        rivals = [rival for rival in range(len(views)) if rival != at and is_distinguishable(views[rival], view)]
        most_N = view.most.cumsum(dim=-1)
        parts = [_mean_of_ratios(view.tempered.cumsum(dim=-1) - most_N)]
        if rivals:
            parts.append(_mean_of_ratios(log_p_HN[rivals] - most_N))
        evidence_N = _mean_of_ratios(torch.stack(parts))
        excluding = (evidence_N >= -math.log(alpha)).nonzero()
        exclusions.append(int(excluding[0]) + 1 if len(excluding) else None)
    return exclusions


def _mean_of_ratios(logs: torch.Tensor) -> torch.Tensor:
    return logs.logsumexp(dim=0) - math.log(len(logs))


def is_distinguishable(served: View, rival: View) -> bool:
    """Whether two hypotheses differ by more than rounding does, as the first one's draws see it."""
    mean, _ = _moments(served, rival)
    noise = max(float(view.noise.mean()) for view in (served, rival))
    return mean > NOISE_MARGIN**2 * noise


def num_draws_needed(served: View, rival: View, alpha: float, num_hypotheses: int) -> float | None:
    """Return how many draws of one hypothesis exclude another one in 99 of 100 audits; None: no number does."""
    if not is_distinguishable(served, rival):
        return None
    mean, variance = _moments(served, rival)
    threshold = math.log(2 * max(1, num_hypotheses - 1) / alpha)
    root = DEVIATIONS * math.sqrt(variance)
    return ((root + math.sqrt(root**2 + 4 * mean * threshold)) / (2 * mean)) ** 2


def _moments(served: View, rival: View) -> tuple[float, float]:
    """Return mean and variance of the log ratio of a draw, over the rows that are kept whole."""
    p_KV = torch.stack([served.whole[at][0] for at in sorted(served.whole)]).double()
    most_KV = torch.stack([rival.whole[at][1] for at in sorted(rival.whole)]).double()
    ratios_KV = p_KV.clamp(min=torch.finfo(torch.float64).tiny).log() - most_KV
    mean_K = (p_KV * ratios_KV).sum(dim=-1)
    variance_K = (p_KV * ratios_KV**2).sum(dim=-1) - mean_K**2
    return float(mean_K.mean()), float(variance_K.clamp(min=0).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLogprobs:
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
        HypothesisValues(at=at, name=name, exact=_flat(values.exact), rounded=_flat(values.rounded))
        for at, view in enumerate(views)
        for name, values in view.readings.items()
    ]


def _flat(values: Mapping[int, list[float]]) -> torch.Tensor:
    return torch.tensor([value for at in sorted(values) for value in values[at]], dtype=torch.float64)


def is_excluded(
    reading: HypothesisValues, rivals: Sequence[HypothesisValues], logprobs: ServerLogprobs, alpha: float
) -> bool:
    """Whether the values are another hypothesis's rather than those of one reading.

    The `rivals` are readings of different hypotheses. A true one is excluded with a probability of at most `alpha`.
    """
    threshold = _threshold(alpha, len(rivals))
    for rival in rivals:
        toward, distance, _ = _sums(reading, rival, logprobs)
        if 2 * toward.sum() > distance.sum() and toward.sum() > threshold * toward.square().sum().sqrt():
            return True
    return False


def num_requests_needed(
    served: HypothesisValues, rival: HypothesisValues, logprobs: ServerLogprobs, alpha: float, num_readings: int
) -> float | None:
    """Return how many requests exclude a reading in 99 of 100 audits if another one is served; None: no number does.

    The error is taken to be as large as HF's own.
    """
    _, distance, noise = _sums(rival, served, logprobs)
    if not distance.sum() > 0:
        return None
    share = float((distance + noise).square().mean().sqrt() / distance.mean())
    sum_needed = _threshold(alpha, num_readings) + DEVIATIONS  # its own deviation is about one
    return (share * sum_needed) ** 2 if 2 * noise.sum().abs() < distance.sum() else None


def _threshold(alpha: float, num_directions: int) -> float:
    return math.sqrt(2 * math.log(max(1, num_directions) / alpha))


def _sums(
    reading: HypothesisValues, rival: HypothesisValues, logprobs: ServerLogprobs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [R] three times: the error along the difference, the difference's own square, and HF's error along it.

    Rows in which HF errs more count less.
    """
    usable = reading.exact.isfinite() & rival.exact.isfinite()
    difference = torch.where(usable, rival.exact - reading.exact, 0.0)
    error = torch.where(usable, logprobs.values - reading.exact, 0.0)
    noises = [
        torch.where(usable & item.rounded.isfinite(), item.rounded - item.exact, 0.0) for item in (reading, rival)
    ]
    least = torch.finfo(torch.float32).eps * reading.exact.masked_fill(~usable, 0.0)
    squares = torch.stack([*noises, least]).square().sum(dim=0)
    squares = torch.zeros(int(logprobs.rows.max()) + 1).double().index_add(0, logprobs.rows, squares)
    weight = 1 / (squares + squares.mean()).clamp(min=1e-24)[logprobs.rows]
    zeros = torch.zeros(int(logprobs.requests.max()) + 1).double()
    return (
        zeros.index_add(0, logprobs.requests, weight * error * difference),
        zeros.index_add(0, logprobs.requests, weight * difference.square()),
        zeros.index_add(0, logprobs.requests, weight * noises[0] * difference),
    )


def fit_of(reading: HypothesisValues, logprobs: ServerLogprobs) -> DefinitionResult:
    """Return how well a reading fits: by the error over the error that HF makes in the server's dtype."""
    is_there = reading.exact.isfinite()
    error = (logprobs.values - reading.exact)[is_there]
    least = torch.finfo(torch.float32).eps * reading.exact[is_there].abs().clamp(min=1.0)
    noise = torch.maximum((reading.rounded - reading.exact)[is_there].nan_to_num(posinf=0.0, neginf=0.0).abs(), least)
    num_misfits = int((~is_there & ~reading.rounded.isfinite()).sum())
    errors = LogprobErrors(error.tolist(), noise.tolist())
    return DefinitionResult.of(reading.name, errors, num_misfits, num_rows=int(logprobs.rows.max()) + 1)
