"""Schedules: the orders in which an engine may be asked to compute the same rows."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, Self, get_args

from harness.errors import Code, HarnessError

_MAX_DIGITS = 9
"""Of a chunk size: no prompt is as long."""

DEFAULT_CHUNK_SIZE = 7
"""Tokens per chunk: no divisor of any usual block size, so that chunks end inside blocks."""

Trigger = Literal[
    "decode", "chunked_prefill", "batch", "ragged_batch", "mixed_batch", "equal_requests", "equal_lengths",
    "same_token", "shared_prefix", "repeated_token", "reordered", "paused", "uneven_end", "block_boundary", "new_block",
    "prefix_hit", "partial_hit", "evicted", "forked", "preempted", "rewound", "drafts_accepted", "drafts_together",
    "gqa", "window_exceeded", "rope_extended", "near_tie",
]  # fmt: skip
TRIGGERS: tuple[str, ...] = get_args(Trigger)
"""Conditions that a workload can be required to reach."""
Parameter = Literal["chunk_size", "num_ranks", "num_drafts"]
DEFAULT_NUM_DRAFTS = 3
"""Tokens that each decode step of a speculating engine verifies beside the true one."""


class ScheduleKind(StrEnum):
    """The ways to put requests into steps; an engine declares those that it can follow."""

    PLAIN = "plain", "one request after the other, each prompt in one step"
    CHUNKED = "chunked", "the same, each prompt in chunks of N tokens", {"parameter": "chunk_size"}
    BATCHED = "batched", "all requests at once", {"is_batched": True}
    MIXED = "mixed", "all at once, prompts in chunks beside decode", {"is_batched": True, "parameter": "chunk_size"}
    PREFIX_HIT = "prefix-hit", "each request again, on cached blocks", {"is_repeated": True, "trigger": "prefix_hit"}
    FORKED = "forked", "requests forked in decode", {"is_batched": True, "is_repeated": True, "trigger": "forked"}
    TENSOR_PARALLEL = "tensor-parallel", "all at once on N ranks", {"is_batched": True, "parameter": "num_ranks"}
    PREEMPTED = "preempted", "all at once, too few KV blocks for all", {"is_batched": True, "trigger": "preempted"}
    REWOUND = "rewound", "each goes on with other tokens, then back", {"has_drafts": True, "trigger": "rewound"}
    SPECULATIVE = (
        "speculative",
        "decode steps verify N drafted tokens, some of them wrong",
        {"has_drafts": True, "trigger": "rewound", "parameter": "num_drafts"},
    )

    help: str
    """What it does, for people."""
    is_batched: bool
    """Whether all requests run at once, rather than one after the other."""
    is_repeated: bool
    """Whether every request is followed by a copy of itself, which shares what it can of the first one's cache."""
    has_drafts: bool
    """Whether requests compute tokens that they give up again: those of `RequestInfo.draft_of`."""
    trigger: Trigger | None
    """The purpose of the schedule, if it is more than batches and chunks."""
    parameter: Parameter | None
    """The field of `Schedule` that a number after the name sets."""

    def __new__(cls, word: str, text: str = "", traits: dict[str, object] | None = None) -> Self:
        """Make a member whose value is its name."""
        kind, defaults = str.__new__(cls, word), dict.fromkeys(("is_batched", "is_repeated", "has_drafts"), False)
        kind._value_, kind.help = word, text
        for name, value in {**defaults, "trigger": None, "parameter": None, **(traits or {})}.items():
            setattr(kind, name, value)
        return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A way to put requests into steps, written `name` or `name:number`: `plain`, `chunked:32`, `tensor-parallel:4`."""

    kind: ScheduleKind
    chunk_size: int | None = None
    """Most tokens of prompt in one step; None for whole prompts."""
    num_ranks: int = 1
    """Processes that share the model."""
    num_drafts: int = 0
    """Drafted tokens that a decode step verifies beside the true one."""

    @classmethod
    def of(cls, name: str) -> "Schedule":
        """Return the schedule of that name, with the default of its parameter."""
        kind = ScheduleKind(name)
        defaults = {"chunk_size": DEFAULT_CHUNK_SIZE, "num_ranks": 2, "num_drafts": DEFAULT_NUM_DRAFTS}
        return (
            cls(kind=kind) if kind.parameter is None else cls(kind=kind, **{kind.parameter: defaults[kind.parameter]})
        )

    @property
    def name(self) -> str:
        """Name without a number."""
        return self.kind.value

    @property
    def is_batched(self) -> bool:
        """See `ScheduleKind.is_batched`."""
        return self.kind.is_batched

    @property
    def is_repeated(self) -> bool:
        """See `ScheduleKind.is_repeated`."""
        return self.kind.is_repeated

    @property
    def has_drafts(self) -> bool:
        """See `ScheduleKind.has_drafts`."""
        return self.kind.has_drafts

    @property
    def trigger(self) -> Trigger | None:
        """See `ScheduleKind.trigger`."""
        return self.kind.trigger

    def __str__(self) -> str:
        if self.kind.parameter is None or self == Schedule.of(self.name):
            return self.name
        return f"{self.name}:{getattr(self, self.kind.parameter)}"

    @property
    def requires(self) -> tuple[str, ...]:
        """Triggers a run under this schedule must reach, or it did not test what it says."""
        chunked = () if self.chunk_size is None else ("chunked_prefill",)
        purpose = () if self.trigger is None else (self.trigger,)
        accepted = ("drafts_accepted",) if self.num_drafts else ()
        return ("decode", *chunked, *(("batch",) if self.is_batched else ()), *purpose, *accepted)

    def pieces(self, prompt_length: int, num_tokens: int) -> Iterator[range]:
        """Yield the positions of a request's steps: the prompt, whole or in chunks, then one after the other."""
        size = self.chunk_size or prompt_length
        for start in range(0, prompt_length, size):
            yield range(start, min(prompt_length, start + size))
        for position in range(prompt_length, num_tokens):
            yield range(position, position + 1)

    def has_batch(self, num_prompts: int) -> bool:
        """Whether so many prompts, and their copies, make a batch."""
        return num_prompts * (1 + self.is_repeated) >= 2

    def is_reachable(self, prompt_lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths can reach what the schedule requires."""
        if self.is_batched and not self.has_batch(len(prompt_lengths)):
            return False
        return self.chunk_size is None or max(prompt_lengths, default=0) > self.chunk_size


DEFAULT_SCHEDULES = (ScheduleKind.PLAIN, ScheduleKind.CHUNKED, ScheduleKind.BATCHED)


def parse_schedule(text: str, *, where: str = "schedule") -> Schedule:
    """Parse `name` or `name:number`; `where` is the option or the key of a file that has it.

    Raises:
        HarnessError: BAD_OPTION: no such schedule, or a number that is not a positive integer or does not apply.
    """
    name, colon, size = text.partition(":")
    if name not in list(ScheduleKind):
        expected = ", ".join(ScheduleKind)
        raise HarnessError(Code.BAD_OPTION, f"unknown schedule {name!r}", where=where, expected=expected, actual=text)
    schedule = Schedule.of(name)
    if not colon:
        return schedule
    number = int(size) if size.isdecimal() and len(size) <= _MAX_DIGITS else 0
    if schedule.kind.parameter == "num_ranks" and number >= 2:
        return replace(schedule, num_ranks=number)
    if schedule.kind.parameter == "chunk_size" and number >= 1:
        return replace(schedule, chunk_size=number)
    if schedule.kind.parameter == "num_drafts" and number >= 1:
        return replace(schedule, num_drafts=number)
    raise HarnessError(
        Code.BAD_OPTION,
        f"schedule {name!r} takes no number {size!r}",
        where=where,
        expected=f"chunked:N, mixed:N or speculative:N, N from 1 to {10**_MAX_DIGITS - 1}; or tensor-parallel:N, "
        "N at least 2",
        actual=text,
    )


def parse_schedules(texts: Iterable[str], *, where: str = "schedule") -> list[Schedule]:
    """Parse several, each text one schedule or a comma list; one that is named twice runs once.

    Raises:
        HarnessError: BAD_OPTION, as `parse_schedule`.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    return list(dict.fromkeys(parse_schedule(name, where=where) for name in names))


def schedules_help() -> str:
    """Return the names for a command's help, with the number that each may take: `plain, chunked[:N], ...`."""
    return ", ".join(f"{kind}[:N]" if kind.parameter else kind.value for kind in ScheduleKind)
