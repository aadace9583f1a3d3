"""Changes of schedule, each a pair of runs that differ in nothing else."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.extensions.fuzz.pool import SequencePool
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
    short = [_request(pool, first + at, item, min(_SHORT, longest)) for at, item in enumerate(sequences[-2:])]
    long = [_request(pool, first + at, item, longest) for at, item in enumerate(sequences[-2:])]
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


@dataclass(frozen=True, slots=True)
class Variation:
    """Two runs, and in words what is different."""

    name: str
    before: str
    after: str
    runs: tuple[RunSetting, RunSetting]


_ALONE, _TOGETHER = RunSetting(schedule="plain"), RunSetting(schedule="batched")
_AGAIN, _REVERSED = replace(_ALONE, number=1), replace(_TOGETHER, is_reversed=True)
_AMONG_SHORT, _AMONG_LONG = replace(_TOGETHER, company="short"), replace(_TOGETHER, company="long")

CHANGES = (
    Variation("repetition", "alone", "alone, again", (_ALONE, _AGAIN)),
    Variation("batch mates", "alone", "in one batch", (_ALONE, _TOGETHER)),
    Variation("order", "in one batch", "in one batch, the last first", (_TOGETHER, _REVERSED)),
    Variation("KV length", "beside short requests", "beside long ones", (_AMONG_SHORT, _AMONG_LONG)),
    Variation("chunk", "prompts whole", "in chunks of 7", (_ALONE, RunSetting(schedule="chunked:7"))),
    Variation("decode", "prompts whole", "token by token", (_ALONE, RunSetting(schedule="chunked:1"))),
    Variation("mixed", "alone", "chunks beside decodes", (_ALONE, RunSetting(schedule="mixed"))),
    Variation("prefix hit", "computed", "found in the cache", (_ALONE, RunSetting(schedule="prefix-hit"))),
    Variation("fork", "alone", "forked", (_ALONE, RunSetting(schedule="forked"))),
    Variation("preemption", "in one batch", "preempted", (_TOGETHER, RunSetting(schedule="preempted"))),
    Variation("ranks", "one rank", "two ranks", (_TOGETHER, RunSetting(schedule="tensor-parallel:2"))),
)
