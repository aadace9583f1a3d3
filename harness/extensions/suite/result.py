"""Results of a suite, as plain data for the reports. Nothing here imports torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any


class CaseVerdict(StrEnum):
    """The ending of a case of a suite; every case ends in exactly one way."""

    PASS = "pass"
    MISMATCH = "mismatch"
    ERROR = "error"
    """It could not be checked, by its own fault or its engine's: bad input, a crash, a time limit."""
    LOST = "lost"
    """It was not checked, by the machinery's fault: a killed worker, a lost node, a store that failed."""


SEVERITY = (CaseVerdict.PASS, CaseVerdict.LOST, CaseVerdict.ERROR, CaseVerdict.MISMATCH)
"""From the best to the worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case of a suite."""

    name: str
    verdict: CaseVerdict
    labels: Mapping[str, str]
    """Labels for the reader: case, model, engine, dtype, schedule, prompts."""
    code: str | None = None
    reason: str | None = None
    """The reason, in a sentence; None for `pass`."""
    first_divergence: Mapping[str, Any] | None = None
    """Tap, schedule, request, position, step, phase, code and cause."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the check that can be compared between suites."""
    bits: str | None = None
    """Digest of all that the engine recorded: equal where every number is. None if the engine gave none."""
    node: str | None = None
    """Machine that it ended on."""
    seconds: float | None = None
    """The check itself."""
    handed_over_s: float | None = None
    """From being handed to a worker until its result was here, the check included."""
    attempts: int = 1
    losses: tuple[str, ...] = ()
    """Why attempts came to nothing, one entry each."""
    report: str | None = None
    """Its own report, relative to the suite's folder."""

    @property
    def divergence_text(self) -> str:
        """The first divergence in a few words; else the reason."""
        if self.first_divergence is None:
            return self.reason or ""
        place = self.first_divergence
        return f"{place['tap']}, request {place['request']}, position {place['position']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """A whole suite."""

    cases: tuple[CaseResult, ...]
    """In the order of the plan."""
    label: str | None = None
    """What was tested: a commit of the engine, a date."""
    begun_at: str | None = None
    """When this command began, in UTC, as ISO 8601 has it."""
    elapsed_s: float = 0.0
    """Of this command; cases of a suite that was resumed may have run before."""
    num_resumed: int = 0
    """Cases whose result was there already."""
    num_goldens: int = 0
    """Goldens that were made."""
    golden_s: float = 0.0
    """Seconds of making them, over all workers."""
    num_workers: int = 0
    """Tasks that could run at once when the suite began."""
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> CaseVerdict:
        """The worst of the cases'."""
        return max((case.verdict for case in self.cases), key=SEVERITY.index, default=CaseVerdict.PASS)

    @property
    def counts(self) -> dict[str, int]:
        """Cases by verdict; together they are all cases."""
        counter = Counter(case.verdict for case in self.cases)
        return {verdict.value: counter[verdict] for verdict in CaseVerdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A figure of a case that is another than before."""

    name: str
    figure: str
    old: float
    new: float
    usual_ratio: float
    """Median of new by old over all cases."""
    largest_usual_ratio: float
    """Ratio up to which noise reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDiff:
    """Changes from one run of a suite to another."""

    new_failures: tuple[tuple[CaseResult, CaseResult], ...]
    """(old, new): passed before and do not now."""
    new_passes: tuple[tuple[CaseResult, CaseResult], ...]
    changed_failures: tuple[tuple[CaseResult, CaseResult], ...]
    """Failed before and fail in another way now: another verdict, or another first divergence."""
    moved: tuple[Moved, ...]
    slower: tuple[Moved, ...]
    added: tuple[CaseResult, ...]
    removed: tuple[CaseResult, ...]
    num_same: int
    """Cases in both that ended as before; their figures may have moved."""

    @property
    def added_failures(self) -> tuple[CaseResult, ...]:
        """Cases that were not there before, and do not pass."""
        return tuple(case for case in self.added if case.verdict is not CaseVerdict.PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTrend:
    """One case over the runs of a suite."""

    name: str
    results: tuple[CaseResult | None, ...]
    """Of each run, the oldest first; None where it was not there."""

    @property
    def latest(self) -> CaseResult | None:
        """The result of the newest run; None if the case is no longer there."""
        return self.results[-1]

    @property
    def first_failure(self) -> int | None:
        """The run since which it does not pass; None if it passes, or is no longer there."""
        failing = None
        for number, result in reversed(list(enumerate(self.results))):
            if result is not None and result.verdict is CaseVerdict.PASS:
                break
            failing = failing if result is None else number
        return None if self.latest is None else failing

    @property
    def last_pass(self) -> int | None:
        """The latest run in which it passed."""
        passed = [n for n, result in enumerate(self.results) if result and result.verdict is CaseVerdict.PASS]
        return max(passed, default=None)

    @property
    def changed_bits(self) -> tuple[int, ...]:
        """Runs in which the engine's numbers were others than in the last run before that has them."""
        known = [(number, result.bits) for number, result in enumerate(self.results) if result and result.bits]
        return tuple(now for (_, before), (now, bits) in pairwise(known) if bits != before)


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteHistory:
    """The runs of a suite over time."""

    runs: tuple[SuiteResult, ...]
    """The oldest first; each without its cases in JSON."""
    trends: tuple[CaseTrend, ...]
    """Every case of any run, by name."""

    def label_of(self, run: int) -> str:
        """Return what a run is called: its label, else when it began, else its number."""
        return self.runs[run].label or self.runs[run].begun_at or f"run {run + 1}"
