"""Schedules: the orders in which an engine may be asked to compute the same rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.errors import Code, HarnessError

_MAX_DIGITS = 9
"""Of a chunk size: no prompt is as long."""

DEFAULT_CHUNK_SIZE = 7
"""Tokens per chunk: no divisor of any usual block size, so that chunks end inside blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A way to put requests into steps.

    Written `name` or `name:number`: plain, chunked, batched, mixed, prefix-hit, forked, preempted, tensor-parallel,
    `chunked:32` (tokens of a chunk), `tensor-parallel:4` (ranks).
    """

    name: str
    is_batched: bool
    """Whether all requests run at once, rather than one after the other."""
    chunk_size: int | None = None
    """Most tokens of prompt in one step; None for whole prompts."""
    is_repeated: bool = False
    """Whether every request is followed by a copy of itself, which shares what it can of the first one's cache."""
    num_ranks: int = 1
    """Processes that share the model."""
    trigger: str | None = None
    """The purpose of the schedule, if it is more than batches and chunks."""

    def __str__(self) -> str:
        if self == SCHEDULES[self.name]:
            return self.name
        return f"{self.name}:{self.chunk_size if self.num_ranks == 1 else self.num_ranks}"

    @property
    def requires(self) -> tuple[str, ...]:
        """Triggers a run under this schedule must reach, or it did not test what it says."""
        chunked = () if self.chunk_size is None else ("chunked_prefill",)
        own = () if self.trigger is None else (self.trigger,)
        return ("decode", *chunked, *(("batch",) if self.is_batched else ()), *own)

    def is_reachable(self, prompt_lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths can reach what the schedule requires."""
        if self.is_batched and len(prompt_lengths) * (1 + self.is_repeated) < 2:
            return False
        return self.chunk_size is None or max(prompt_lengths, default=0) > self.chunk_size


SCHEDULES = {
    "plain": Schedule(name="plain", is_batched=False),
    "chunked": Schedule(name="chunked", is_batched=False, chunk_size=DEFAULT_CHUNK_SIZE),
    "batched": Schedule(name="batched", is_batched=True),
    "mixed": Schedule(name="mixed", is_batched=True, chunk_size=DEFAULT_CHUNK_SIZE),
    "prefix-hit": Schedule(name="prefix-hit", is_batched=False, is_repeated=True, trigger="prefix_hit"),
    "forked": Schedule(name="forked", is_batched=True, is_repeated=True, trigger="forked"),
    "tensor-parallel": Schedule(name="tensor-parallel", is_batched=True, num_ranks=2),
    "preempted": Schedule(name="preempted", is_batched=True, trigger="preempted"),
}
DEFAULT_SCHEDULES = ("plain", "chunked", "batched")


def parse_schedule(text: str) -> Schedule:
    """Parse `name` or `name:number`.

    Raises:
        HarnessError: BAD_OPTION: no such schedule, or a number that is not a positive integer or does not apply.
    """
    name, colon, size = text.partition(":")
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise HarnessError(
            Code.BAD_OPTION, f"unknown schedule {name!r}", where="schedule", expected=", ".join(SCHEDULES), actual=text
        )
    if not colon:
        return schedule
    is_number = size.isdecimal() and len(size) <= _MAX_DIGITS and int(size) >= 1
    if is_number and schedule.num_ranks > 1 and int(size) > 1:
        return replace(schedule, num_ranks=int(size))
    if is_number and schedule.chunk_size is not None:
        return replace(schedule, chunk_size=int(size))
    raise HarnessError(
        Code.BAD_OPTION,
        f"schedule {name!r} takes no number {size!r}",
        where="schedule",
        expected=f"chunked:N or mixed:N, N from 1 to {10**_MAX_DIGITS - 1}; or tensor-parallel:N, N at least 2",
        actual=text,
    )


def parse_schedules(texts: Iterable[str]) -> list[Schedule]:
    """Parse several, each text one schedule or a comma list; one that is named twice runs once.

    Raises:
        HarnessError: BAD_OPTION, as `parse_schedule`.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    return list(dict.fromkeys(parse_schedule(name) for name in names))
