"""Changes of schedule, each a pair of runs that differ in nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule, parse_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The requests of one round."""

    subjects: Sequence[RequestInfo]
    """Requests that every run computes."""
    short: Sequence[RequestInfo]
    """Short company for them."""
    long: Sequence[RequestInfo]
    """Company whose KV is longer than theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetting:
    """A run of an engine: some requests under a schedule."""

    schedule: str
    company: str = "none"
    """`none`, `short` or `long`: who is there besides the subjects."""
    is_reversed: bool = False
    number: int = 0
    """Runs that are alike in all else are told apart by it."""

    def parsed(self) -> Schedule:
        """Return the schedule."""
        return parse_schedule(self.schedule)

    def requests(self, prompts: Prompts) -> list[RequestInfo]:
        """Return the requests in the order in which they are sent."""
        company = {"none": [], "short": prompts.short, "long": prompts.long}[self.company]
        requests = [*prompts.subjects, *company]
        return requests[::-1] if self.is_reversed else requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """Two runs, and in words what is different."""

    name: str
    before: str
    after: str
    runs: tuple[RunSetting, RunSetting]


_ALONE, _TOGETHER = RunSetting(schedule="plain"), RunSetting(schedule="batched")

CHANGES = (
    Variation(
        name="repetition", before="alone", after="alone, again", runs=(_ALONE, RunSetting(schedule="plain", number=1))
    ),
    Variation(name="batch mates", before="alone", after="in one batch", runs=(_ALONE, _TOGETHER)),
    Variation(
        name="order",
        before="in one batch",
        after="in one batch, the last first",
        runs=(_TOGETHER, RunSetting(schedule="batched", is_reversed=True)),
    ),
    Variation(
        name="KV length",
        before="beside short requests",
        after="beside long ones",
        runs=(RunSetting(schedule="batched", company="short"), RunSetting(schedule="batched", company="long")),
    ),
    Variation(
        name="chunk", before="prompts whole", after="in chunks of 7", runs=(_ALONE, RunSetting(schedule="chunked:7"))
    ),
    Variation(
        name="decode", before="prompts whole", after="token by token", runs=(_ALONE, RunSetting(schedule="chunked:1"))
    ),
    Variation(name="mixed", before="alone", after="chunks beside decodes", runs=(_ALONE, RunSetting(schedule="mixed"))),
    Variation(
        name="prefix hit",
        before="computed",
        after="found in the cache",
        runs=(_ALONE, RunSetting(schedule="prefix-hit")),
    ),
    Variation(name="fork", before="alone", after="forked", runs=(_ALONE, RunSetting(schedule="forked"))),
    Variation(
        name="preemption", before="in one batch", after="preempted", runs=(_TOGETHER, RunSetting(schedule="preempted"))
    ),
    Variation(
        name="ranks", before="one rank", after="two ranks", runs=(_TOGETHER, RunSetting(schedule="tensor-parallel:2"))
    ),
)
