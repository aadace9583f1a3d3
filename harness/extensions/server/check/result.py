"""Results of a check of a server, as plain data for the reports. Nothing here imports torch."""

from dataclasses import dataclass
from typing import ClassVar

from harness.extensions.server.logprobs import ratio
from harness.extensions.server.result import Capability, ServerResult
from harness.results.check import Explanation, Finding, Outcome, TokenResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobResult:
    """Log probabilities of one kind against the truth, over all rows of a schedule."""

    IN_DOCUMENT: ClassVar = ("rms_ratio", "max_ratio")
    kind: str
    """`chosen`, `top`, `prompt`."""
    num_rows: int
    num_values: int
    rms: float
    """Of the server's errors, nats."""
    rms_noise: float
    """Of the errors that HF makes in the server's dtype, for the same tokens."""
    rms_bound: float
    """Most that `rms` may be, as a multiple of `rms_noise`."""
    max: float
    max_noise: float
    max_bound: float
    """Most that `max` may be, as a multiple of `max_noise`."""
    worst_request: int
    worst_position: int
    """Position of the token whose log probability is furthest off."""
    is_sound: bool

    @property
    def rms_ratio(self) -> float:
        """Error over noise; 0 if both vanish."""
        return ratio(self.rms, self.rms_noise)

    @property
    def max_ratio(self) -> float:
        """Largest error over largest noise; 0 if both vanish."""
        return ratio(self.max, self.max_noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResult:
    """The prompts sent in one way."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    schedule: str
    """`together`, `alone`, `repeated`, `reversed`, `continued`, `streamed`, `prompt`, `plain`, `text`, `several`."""
    num_requests: int
    num_failed: int
    """Requests without an answer that can be judged."""
    num_tokens: int
    """New tokens that the server made."""
    tokens: TokenResult
    logprobs: tuple[LogprobResult, ...]
    num_diverged: int = 0
    """Answers that diverge from the first schedule's at a tie; the tokens after the tie are not judged."""
    max_difference: float | None = None
    """Largest difference of a log probability to the first schedule's, nats; None if nothing is shared."""
    seconds: float = 0.0
    """From the first request to the last answer; other schedules than `together` and `alone` share this time."""
    findings: tuple[Finding, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Nothing, if no token was judged."""
        if self.findings:
            return Outcome.MISMATCH
        return Outcome.PASS if self.tokens.compared else Outcome.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointResult(ServerResult):
    """A whole check of a server."""

    num_requests: int
    capabilities: tuple[Capability, ...]
    runs: tuple[ScheduleResult, ...]
    server_s: float
    """Seconds that the server was waited for, the probe included."""
    truth_s: float
    """Seconds of HF's forwards, most of them while the server was waited for."""
    all_s: float
    explanation: Explanation | None = None
    """The change of HF's model under which the log probabilities of the first schedule come out, if they are wrong."""
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Mismatch if any schedule has a finding; pass if all judged something."""
        return Outcome.of_all(run.outcome for run in self.runs)
