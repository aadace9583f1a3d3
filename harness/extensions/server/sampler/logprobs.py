"""What a server's log probabilities are of: the model's own distribution, or that of one of the steps after it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from harness.errors import Code
from harness.extensions.server.logprobs import UNDERFLOW, DefinitionResult, LogprobErrors, is_number
from harness.extensions.server.sampler.evidence import Draw
from harness.oracle.sampling import Chain
from harness.results.check import Finding

_PENALTIES = ("logit_bias", "repetition", "presence")
_MOST_SUM = 1e-3
"""A sum of probabilities may be above one by so much."""


class Definition(StrEnum):
    """A distribution that log probabilities may be of."""

    RAW = "raw"
    PENALISED = "after penalties and bias"
    TEMPERED = "after the temperature"
    PROCESSED = "of the distribution that is drawn from"


@dataclass(slots=True, kw_only=True)
class LogprobEvidence:
    """Log probabilities of all draws, under each definition."""

    chain: Chain
    errors: dict[Definition, LogprobErrors] = field(
        default_factory=lambda: {definition: LogprobErrors() for definition in Definition}
    )
    num_misfits: dict[Definition, int] = field(default_factory=lambda: dict.fromkeys(Definition, 0))
    """Values where the definition has none, and none where it has one."""
    findings: list[Finding] = field(default_factory=list)
    num_rows: int = 0

    def add(
        self,
        draw: Draw,
        logprobs: Mapping[int, float | None],
        logits: torch.Tensor,
        control: torch.Tensor,
        position: int,
    ) -> None:
        """Add what a server says of one row: logits [V] float64 by the truth, and by HF in the server's dtype."""
        self.num_rows += 1
        total = sum(math.exp(min(value, 0.0)) for value in logprobs.values() if is_number(value))
        if total > 1 + _MOST_SUM and len(self.findings) < 3:
            message = f"the probabilities of {len(logprobs)} tokens add up to {total:.4f}"
            self.findings.append(
                Finding(code=Code.ENDPOINT_LOGPROBS, message=message, request=draw.request, position=position)
            )
        eps = float(torch.finfo(torch.float32).eps * logits.abs().max().clamp(min=1e-6))  # never zero
        truths, controls = _definitions(self.chain, draw, logits), _definitions(self.chain, draw, control)
        for definition, errors in self.errors.items():
            for token_id, value in logprobs.items():
                expected, rounded = float(truths[definition][token_id]), float(controls[definition][token_id])
                if is_number(value) and math.isfinite(expected):
                    errors.add(value - expected, max(abs(rounded - expected) if math.isfinite(rounded) else 0.0, eps))
                elif is_number(value):
                    self.num_misfits[definition] += not math.isfinite(expected) and not math.isfinite(rounded)
                else:
                    self.num_misfits[definition] += min(expected, rounded) > UNDERFLOW

    def results(self) -> tuple[DefinitionResult, ...]:
        """Return how well each definition fits; nothing if there were no log probabilities."""
        return tuple(
            DefinitionResult.of(definition.value, errors, self.num_misfits[definition], self.num_rows)
            for definition, errors in self.errors.items()
            if errors.values or self.num_misfits[definition]
        )


def _definitions(chain: Chain, draw: Draw, logits: torch.Tensor) -> dict[Definition, torch.Tensor]:
    settings = draw.settings
    penalties = Chain(
        steps=(*(step for step in chain.steps if step in _PENALTIES), "temperature"),
        repetition_over=chain.repetition_over,
        presence_over=chain.presence_over,
    )
    penalised = penalties.scores(logits, settings, draw.past, until="temperature")
    return {
        Definition.RAW: logits.log_softmax(dim=-1),
        Definition.PENALISED: penalised.log_softmax(dim=-1),
        Definition.TEMPERED: (penalised / (settings.temperature or 1.0)).log_softmax(dim=-1),
        Definition.PROCESSED: chain.probabilities(logits, settings, draw.past).log(),
    }
