"""Results of an audit of what a server serves, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from harness.extensions.server.logprobs import DefinitionResult
from harness.extensions.server.result import ServerResult
from harness.results.check import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class HypothesisResult:
    """What a server's answers say of one hypothesis."""

    IN_DOCUMENT: ClassVar = ("is_excluded", "fits")
    name: str
    log_likelihood: float
    """Of the tokens, in nats a token."""
    excluded_after: int | None
    """Tokens after which they exclude it; None: they do not."""
    is_excluded_by_logprobs: bool
    readings: tuple[DefinitionResult, ...]
    """How well the log probabilities fit; empty if there are none."""
    needed: Mapping[str, int | None]
    """If this one is served: tokens that exclude each other one in 99 of 100 audits; None: no number does."""

    @property
    def is_excluded(self) -> bool:
        """Whether the tokens or the log probabilities exclude it."""
        return self.excluded_after is not None or self.is_excluded_by_logprobs

    @property
    def fits(self) -> bool:
        """Whether the error of the log probabilities is rounding; true where there are none."""
        return not self.readings or any(reading.fits for reading in self.readings)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult(ServerResult):
    """What a server's answers say of some hypotheses. The first is the one that the server claims."""

    IN_DOCUMENT: ClassVar = ("outcome", "claim", "remaining")
    num_tokens: int
    num_requests: int
    num_logprobs: int
    false_claim: float
    """A claim is of another hypothesis than of the one that is served in fewer audits than this share."""
    hypotheses: tuple[HypothesisResult, ...]
    notes: tuple[str, ...] = ()
    server_s: float = 0.0
    truth_s: float = 0.0

    @property
    def remaining(self) -> tuple[str, ...]:
        """Hypotheses that nothing excludes."""
        return tuple(hypothesis.name for hypothesis in self.hypotheses if not hypothesis.is_excluded)

    @property
    def claim(self) -> str | None:
        """The hypothesis that the server serves: the only one that remains, if it fits."""
        remaining = [hypothesis for hypothesis in self.hypotheses if not hypothesis.is_excluded]
        return remaining[0].name if len(remaining) == 1 and remaining[0].fits else None

    @property
    def outcome(self) -> Outcome:
        """Pass if the claim is the first hypothesis, a mismatch if that one is excluded, and else nothing."""
        if self.hypotheses[0].is_excluded:
            return Outcome.MISMATCH
        return Outcome.PASS if self.claim == self.hypotheses[0].name else Outcome.NOTHING
