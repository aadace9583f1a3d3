"""Findings of a search of workloads, as plain data for the reports. Nothing here imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.results.check import Outcome, RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request of a workload, as it was sent to the engine."""

    token_ids: tuple[int, ...]
    """The tokens fed: prompt and continuation without its last token."""
    prompt_length: int
    arrival: int = 0
    """Steps that the engine had run when it was added."""
    is_aborted: bool = False
    """Whether it was aborted when its last row had been computed, rather than finished."""
    fork_of: int | None = None
    """Number of the request that it was forked from, when that had made its first token."""

    @property
    def num_new_tokens(self) -> int:
        """Tokens that it makes."""
        return len(self.token_ids) - self.prompt_length + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWorkload:
    """A workload that an engine computed."""

    requests: tuple[SentRequest, ...]
    """Their numbers are their places here."""
    limits: Mapping[str, int | bool] = field(default_factory=dict)
    """Of the engine, as far as the workload sets them."""
    schedule: str | None = None
    """Name of a schedule, for engines that follow schedules by name only."""

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return sum(len(request.token_ids) for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzFinding:
    """A workload that an engine gets wrong."""

    signature: str
    """Code and operation: they tell findings apart."""
    workload: SentWorkload
    run: RunResult | None
    """The judgement; None if the engine did not get to the end."""
    error: str | None
    """The error that ended the engine; None if it finished."""
    found_s: float
    """Seconds from the beginning of the command until a workload failed."""
    shrunk_s: float
    """Seconds that shrinking took."""
    num_rows_found: int
    """Rows of the workload that was found, before it was shrunk."""
    num_requests_found: int
    num_failures: int = 1
    """Workloads that failed in the same way."""
    workload_file: str | None = None
    """File that repeats it with `harness fuzz run --replay`."""
    case_file: str | None = None
    """Case that was seen to fail in the same way; None if no case can say what the workload says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzResult:
    """A whole search."""

    engine: str
    model: str
    dtype: str
    device: str
    seed: int
    findings: tuple[FuzzFinding, ...]
    num_workloads: int
    """Judged from beginning to end; those of shrinking are not counted."""
    num_rows: int
    rejected: Mapping[str, int] = field(default_factory=dict)
    """By the engine's words: workloads that it says it does not serve."""
    coverage: Mapping[str, int] = field(default_factory=dict)
    """By what the engine's scheduler did: workloads in which it did so."""
    golden_s: float = 0.0
    elapsed_s: float = 0.0
    was_interrupted: bool = False
    unreached: tuple[str, ...] = ()
    """Conditions without which a search that found nothing says nothing, and which no workload reached."""
    notes: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Mismatch if anything was found; nothing if too little was judged, or the search did not come to its end."""
        if self.findings:
            return Outcome.MISMATCH
        is_whole = self.num_workloads and not self.unreached and not self.was_interrupted
        return Outcome.PASS if is_whole else Outcome.NOTHING
