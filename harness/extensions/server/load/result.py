"""Results of a load test of a server, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from harness.extensions.server.check.result import ScheduleResult
from harness.extensions.server.result import ServerResult
from harness.results.check import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Milliseconds over requests, or over the parts of all answers."""

    num_values: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult(ServerResult):
    """A whole load test."""

    IN_DOCUMENT: ClassVar = ("outcome", "requests_per_s", "new_tokens_per_s", "goodput_per_s", "good_share")
    arrivals: str
    """In words: rate and bursts."""
    num_requests: int
    num_answered: int
    num_turned_away: int
    """Refused with 429 or 503, as a server under too much load may."""
    num_prompt_tokens: int
    """Of the requests that were answered."""
    num_new_tokens: int
    seconds: float
    """From the first request to the end of the last answer."""
    late_ms: Quantiles
    """How late the client itself sent a request."""
    times_ms: Mapping[str, Quantiles]
    """`ttft` (request to first token), `tpot` (mean time of each later token of an answer), `itl` (between two parts of
    an answer), `e2e` (request to end)."""
    limits_ms: Mapping[str, float]
    """Of the times of one request."""
    num_good: int
    """Requests answered within all limits, and not found wrong."""
    num_judged: int
    """Answers that were checked against HF's truth."""
    answers: ScheduleResult
    """The verdict on these answers."""
    truth_s: float
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """The outcome of the answers: nothing if no token was judged."""
        return self.answers.outcome

    @property
    def requests_per_s(self) -> float:
        """Answered requests a second."""
        return self.num_answered / self.seconds if self.seconds else 0.0

    @property
    def new_tokens_per_s(self) -> float:
        """New tokens a second, of all answers."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput_per_s(self) -> float:
        """Good requests a second."""
        return self.num_good / self.seconds if self.seconds else 0.0

    @property
    def good_share(self) -> float:
        """Good requests of all that were sent."""
        return self.num_good / self.num_requests
