"""Changes of schedule, each a pair of runs that differ in nothing else."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from harness.campaigns.fuzz.pool import SequencePool
from harness.formats.recording import RequestInfo
from harness.formats.schedule import Schedule, parse_schedule

NUM_SUBJECTS = 3
NUM_NEW = 4
"""Tokens that each request makes."""
_SHORT = 6
"""Tokens of a request that is short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The requests of one round."""

    subjects: Sequence[RequestInfo]
    """Requests that every run computes."""
    short: Sequence[RequestInfo]
    """Short company for them."""
    long: Sequence[RequestInfo]
    """Company whose KV is longer than theirs."""


def draw_prompts(pool: SequencePool, generator: random.Random) -> Prompts:
    """Draw the requests of a round: subjects of three lengths, and the beginnings of others as their company."""
    longest = pool.num_tokens - NUM_NEW + 1
    sequences = generator.sample(range(len(pool.sequences)), NUM_SUBJECTS + 2)
    middle = range(max(2, longest // 3), max(3, longest - longest // 4))
    subjects = [_request(pool, at, sequence, generator.choice(middle)) for at, sequence in enumerate(sequences[:-2])]
    first = len(subjects)
    short = [_request(pool, first + at, each, min(_SHORT, longest)) for at, each in enumerate(sequences[-2:])]
    long = [_request(pool, first + at, each, longest) for at, each in enumerate(sequences[-2:])]
    return Prompts(subjects=subjects, short=short, long=long)


def _request(pool: SequencePool, number: int, sequence: int, length: int) -> RequestInfo:
    tokens = list(pool.sequences[sequence][: length + NUM_NEW - 1])
    return RequestInfo(id=number, token_ids=tokens, prompt_length=len(tokens) - NUM_NEW + 1)


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
