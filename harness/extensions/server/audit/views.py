"""What one hypothesis says of the server's draws: how likely each is, and the log probabilities of named tokens.

Shapes: N draws, V vocab, T temperatures.
"""

from dataclasses import dataclass, field

import torch

from harness.extensions.server.endpoint.logprobs import is_number
from harness.extensions.server.sampler.evidence import LEAST, NOISE_MARGIN, RESOLUTION, SHARE, Draw
from harness.oracle.sampling import Chain, SamplingSettings

_TEMPERATURES = (0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5)
"""A hypothesis is held against itself at these, relative to its own: what is served may be none of the list."""
RAW, PROCESSED = "raw", "of the distribution that is drawn from"

Given = dict[int, float | None]
"""Log probabilities of one row by token."""


@dataclass(slots=True)
class Values:
    """Log probabilities of the tokens that the server named, under one reading of what they are of."""

    exact: dict[int, list[float]] = field(default_factory=dict)
    """Of each draw, by the truth."""
    rounded: dict[int, list[float]] = field(default_factory=dict)
    """The same by HF in the server's dtype."""


class View:
    """One hypothesis before all draws."""

    def __init__(self, settings: SamplingSettings, num_draws: int, *, every: int) -> None:
        """Take what is drawn with, and keep every so-manieth row whole."""
        self.settings, self.every = settings, every
        self.most = torch.zeros(num_draws).double()
        """[N] Logarithm of the largest probability that rounding leaves a draw: no single one excludes."""
        self.own = torch.zeros_like(self.most)
        """[N] The same of the probability, a share of it spread over all tokens."""
        self.tempered = torch.zeros(len(_TEMPERATURES), num_draws).double()
        """[T, N] as `own`, at the other temperatures."""
        self.noise = torch.zeros_like(self.most)
        """[N] KL between the model's distributions by the truth and by HF in the server's dtype, in nats."""
        self.readings: dict[str, Values] = {}
        self.whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of some draws all probabilities, and logarithms of the largest ones, [V] float32."""

    def add(self, at: int, draw: Draw, given: Given, logits: torch.Tensor, control: torch.Tensor) -> None:
        """Add one draw.

        `given` is what the server says of its row; `logits` are the truth's and `control` those of HF in the server's
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
        self.own[at] = _spread(p, plain)[ids].sum().log()
        self.tempered[:, at] = _spread(tempered_TV, plain)[:, ids].sum(dim=-1).log()
        self.noise[at] = (plain * (exact - noisy)).sum()
        if at % self.every == 0:
            self.whole[at] = (p.float(), most.log().float())
        self._add_values(at, given, RAW, exact, noisy)
        if self.settings.changed:
            self._add_values(at, given, PROCESSED, p.log(), rounded.log())

    def _add_values(self, at: int, given: Given, reading: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        values, ids = self.readings.setdefault(reading, Values()), named(given)
        values.exact[at], values.rounded[at] = exact[ids].tolist(), rounded[ids].tolist()


def named(given: Given) -> list[int]:
    """Return the tokens with a log probability that can be compared."""
    return [token_id for token_id, value in sorted(given.items()) if is_number(value)]


def _spread(p: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    return (1 - SHARE) * p + SHARE * plain
