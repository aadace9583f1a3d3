"""What a server's log probabilities are of: the model's own distribution, or that of one of the steps after it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from harness.errors import Code
from harness.extensions.server.check.judge import bounds, is_number
from harness.extensions.server.sampler.evidence import Draw
from harness.extensions.server.sampler.result import DefinitionResult
from harness.oracle.sampling import Chain
from harness.results.check import Finding

_UNDERFLOW = math.log(2.0**-126)
_PENALTIES = ("logit_bias", "repetition", "presence")
_MOST_SUM = 1e-3
"""A sum of probabilities may be above one by so much."""


class Definition(StrEnum):
    """A distribution that log probabilities may be of."""

    RAW = "raw"
    PENALISED = "after penalties and bias"
    TEMPERED = "after the temperature"
    PROCESSED = "of the distribution that is drawn from"


@dataclass(slots=True)
class _Errors:
    """Errors under one definition."""

    own: list[float] = field(default_factory=list)
    noise: list[float] = field(default_factory=list)
    num_misfits: int = 0
    """Values where the definition has none, and none where it has one."""


@dataclass(slots=True, kw_only=True)
class LogprobEvidence:
    """Log probabilities of all draws, under each definition."""

    chain: Chain
    errors: dict[Definition, _Errors] = field(default_factory=lambda: {item: _Errors() for item in Definition})
    findings: list[Finding] = field(default_factory=list)
    num_rows: int = 0

    def add(
        self, draw: Draw, given: Mapping[int, float | None], logits: torch.Tensor, control: torch.Tensor, position: int
    ) -> None:
        """Add what a server says of one row: logits [V] float64 by the truth, and by HF in the server's dtype."""
        self.num_rows += 1
        total = sum(math.exp(min(value, 0.0)) for value in given.values() if is_number(value))
        if total > 1 + _MOST_SUM and len(self.findings) < 3:
            message = f"the probabilities of {len(given)} tokens add up to {total:.4f}"
            self.findings.append(
                Finding(code=Code.ENDPOINT_LOGPROBS, message=message, request=draw.request, position=position)
            )
        eps = float(torch.finfo(torch.float32).eps * logits.abs().max().clamp(min=1e-6))  # never zero
        truths, owns = _definitions(self.chain, draw, logits), _definitions(self.chain, draw, control)
        for definition, errors in self.errors.items():
            truth, own = truths[definition], owns[definition]
            for token_id, value in given.items():
                expected, noisy = float(truth[token_id]), float(own[token_id])
                if is_number(value) and math.isfinite(expected):
                    errors.own.append(value - expected)
                    errors.noise.append(max(abs(noisy - expected) if math.isfinite(noisy) else 0.0, eps))
                elif is_number(value):
                    errors.num_misfits += not math.isfinite(expected) and not math.isfinite(noisy)
                else:
                    errors.num_misfits += min(expected, noisy) > _UNDERFLOW

    def results(self) -> tuple[DefinitionResult, ...]:
        """Return how well each definition fits; nothing if there were no log probabilities."""
        rms_bound, max_bound = bounds(max(1, self.num_rows))
        return tuple(
            DefinitionResult(
                name=definition.value,
                num_values=len(errors.own),
                num_misfits=errors.num_misfits,
                rms_ratio=_rms(errors.own) / _rms(errors.noise) if errors.own else 0.0,
                max_ratio=max(map(abs, errors.own), default=0.0) / max(errors.noise, default=1.0),
                rms_bound=rms_bound,
                max_bound=max_bound,
            )
            for definition, errors in self.errors.items()
            if errors.own or errors.num_misfits
        )


def _definitions(chain: Chain, draw: Draw, logits: torch.Tensor) -> dict[Definition, torch.Tensor]:
    own = draw.settings
    penalties = Chain(
        steps=(*(step for step in chain.steps if step in _PENALTIES), "temperature"),
        repetition_over=chain.repetition_over,
        presence_over=chain.presence_over,
    )
    penalised = penalties.scores(logits, own, draw.past, until="temperature")
    return {
        Definition.RAW: logits.log_softmax(dim=-1),
        Definition.PENALISED: penalised.log_softmax(dim=-1),
        Definition.TEMPERED: (penalised / (own.temperature or 1.0)).log_softmax(dim=-1),
        Definition.PROCESSED: chain.probabilities(logits, own, draw.past).log(),
    }


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
