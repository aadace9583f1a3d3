"""The requests of a profile, and the steps that each phase is measured by.

Requests come from three numbers or from the user's prompts. Every pass runs the same requests again, so the steps that
the first run found are those of every later run.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import ge

from harness.engines.stepping import Session
from harness.errors import Code, HarnessError
from harness.oracle.requests import Prompt
from harness.results.profile import StepShape

Take = Callable[[int], Sequence[int]]
"""Computes the step of this index and returns the requests that got a token by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequests:
    """Requests that arrive together, and perhaps one more that arrives during their decode."""

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: tuple[int, ...]
    """Of each prompt."""
    late: tuple[int, ...] | None = None
    """Prompt of a request that arrives when all others have a token; the load ends when it has one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSchedule:
    """The part of a phase that is captured, in the terms of torch.profiler."""

    wait: int = 1
    """Units without the profiler: steps of decode, or whole runs of other phases, which have one step in each run."""
    warmup: int = 1
    """Units with the profiler on whose events are dropped."""
    active: int = 8
    """The most steps of a phase that are captured."""
    repeat: int = 1
    """Cycles; each has its own run and its own trace."""

    def __post_init__(self) -> None:
        for name, minimum in (("wait", 0), ("warmup", 0), ("active", 1), ("repeat", 1)):
            if getattr(self, name) < minimum:
                raise HarnessError(
                    Code.BAD_OPTION,
                    f"{name} is too small",
                    where=f"--{name}",
                    expected=f"at least {minimum}",
                    actual=getattr(self, name),
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """One step of a load as an earlier run has computed it."""

    index: int
    shape: StepShape
    names: tuple[str, ...]
    """Operations in the order in which they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The steps of one phase that every pass captures."""

    phase: str
    load: ProfileRequests
    steps: tuple[PlannedStep, ...]
    """Consecutive."""
    before: tuple[PlannedStep, ...]
    """All that the load runs before them."""
    schedule: CaptureSchedule
    runs: tuple[tuple[range, ...], ...] = field(default=())
    """For each run of one cycle, the units of the schedule as ranges of step indices."""

    @property
    def num_steps(self) -> int:
        """Steps of a run up to the last that is captured."""
        return len(self.before) + len(self.steps)

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """Shapes of the captured steps."""
        return tuple(step.shape for step in self.steps)

    @property
    def shapes_so_far(self) -> tuple[StepShape, ...]:
        """Shapes of all steps up to the last that is captured."""
        return (*(step.shape for step in self.before), *self.shapes)


def run_steps(session: Session, load: ProfileRequests, take: Take, *, num_steps: int | None = None) -> None:
    """Run a load, or its first `num_steps` steps, taking each step by `take`; the requests are dropped afterwards.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: the engine goes on with a request that has all of its tokens.
    """
    longest = max(load.max_new_tokens)
    # The longest requests would go on, so that none of them ends in a captured step, and one that is late meets them.
    limits = [limit + (limit == longest) for limit in load.max_new_tokens]
    num_tokens: Counter[int] = Counter()
    try:
        requests = [session.add(prompt, limit) for prompt, limit in zip(load.prompts, limits, strict=True)]
        late: int | None = None
        index = 0
        while num_steps is None or index < num_steps:
            num_tokens.update(take(index))
            index += 1
            num_generated = [num_tokens[request] for request in requests]
            _refuse_overrun(num_generated, load)
            if load.late is not None and late is None and all(num_generated):
                late = session.add(load.late, longest + 1)
            if _is_done(load, num_generated, num_tokens[late] if late else None):
                break
    finally:
        session.stop()


def _is_done(load: ProfileRequests, num_tokens: list[int], num_late_tokens: int | None) -> bool:
    if load.late is not None:
        return bool(num_late_tokens)
    return all(map(ge, num_tokens, load.max_new_tokens))


def _refuse_overrun(num_tokens: list[int], load: ProfileRequests) -> None:
    for index, (actual, limit) in enumerate(zip(num_tokens, load.max_new_tokens, strict=True)):
        if actual > limit < max(load.max_new_tokens):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "the engine goes on with a request that has all of its new tokens",
                where=f"request {index}",
                expected=f"{limit} new tokens",
                actual=actual,
                hint="--max-new-tokens N, or one max_tokens in all lines of a file; the engine reference ends each",
            )


class _Rehearsal:
    """Record the steps and where their operations end."""

    def __init__(self) -> None:
        self.steps: list[PlannedStep] = []
        self._shape: StepShape | None = None
        self._names: list[str] = []

    def begin_step(self, shape: StepShape) -> None:
        self._shape = shape

    def reached(self, name: str) -> None:
        self._names.append(name)

    def end_step(self) -> None:
        assert self._shape is not None, "every session announces its steps"
        self.steps.append(PlannedStep(index=len(self.steps), shape=self._shape, names=tuple(self._names)))
        self._shape, self._names = None, []


def dry_run(session: Session, load: ProfileRequests) -> tuple[PlannedStep, ...]:
    """Run a load twice, the first time to warm everything up, and return its steps."""
    run_steps(session, load, lambda _index: session.step())
    rehearsal = _Rehearsal()

    def take(_index: int) -> Sequence[int]:
        requests = session.step()
        rehearsal.end_step()
        return requests

    with session.watching(rehearsal):
        run_steps(session, load, take)
    return tuple(rehearsal.steps)


def window(phase: str, load: ProfileRequests, steps: Sequence[PlannedStep], schedule: CaptureSchedule) -> Window:
    """Choose the steps of a phase that are captured.

    Raises:
        HarnessError: PHASE_WITHOUT_STEP.
    """
    phase_steps = [step.index for step in steps if step.shape.phase == phase]
    if not phase_steps:
        seen = ", ".join(sorted({step.shape.phase for step in steps}))
        hint = "--max-new-tokens 2 or more: the first token comes from prefill" if phase == "decode" else None
        raise HarnessError(
            Code.PHASE_WITHOUT_STEP,
            f"the phase {phase!r} ran no step",
            expected="at least one step",
            actual=f"{len(steps)} step{'s' * (len(steps) != 1)}: {seen}",
            hint=hint,
        )
    num_skipped = min(schedule.wait + schedule.warmup, len(phase_steps) - 1) if phase == "decode" else 0
    first = phase_steps[num_skipped]
    captured = [index for offset, index in enumerate(phase_steps[num_skipped:]) if index == first + offset][
        : schedule.active
    ]
    return Window(
        phase=phase,
        load=load,
        steps=tuple(steps[index] for index in captured),
        before=tuple(steps[:first]),
        schedule=schedule,
        runs=_decode_runs(phase_steps, num_skipped, captured) if phase == "decode" else _whole_runs(captured, schedule),
    )


def _decode_runs(phase_steps: list[int], num_skipped: int, captured: list[int]) -> tuple[tuple[range, ...], ...]:
    return (tuple(range(index, index + 1) for index in (*phase_steps[:num_skipped], *captured)),)


def _whole_runs(captured: list[int], schedule: CaptureSchedule) -> tuple[tuple[range, ...], ...]:
    return ((range(captured[0], captured[-1] + 1),),) * (schedule.wait + schedule.warmup + 1)


_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWorkload:
    """The number and the lengths of the requests.

    Raises:
        HarnessError: BAD_OPTION: a number is not positive.
    """

    batch_size: int = 1
    num_prompt_tokens: int = 128
    """Of each prompt; of the longest where there are `prompts`."""
    max_new_tokens: int = 32
    """Of each request; of the longest where there are `prompts`."""
    prompts: tuple[Prompt, ...] = ()
    """Empty: random ones, as many and as long as the numbers say."""

    @classmethod
    def of_prompts(cls, prompts: Sequence[Prompt]) -> "ProfileWorkload":
        """Return the workload of prompts that all arrive at once."""
        return cls(
            batch_size=len(prompts),
            num_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts),
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            prompts=tuple(prompts),
        )

    def __post_init__(self) -> None:
        for option, value in (
            ("--batch-size", self.batch_size),
            ("--prompt-tokens", self.num_prompt_tokens),
            ("--max-new-tokens", min([self.max_new_tokens, *(prompt.max_new_tokens for prompt in self.prompts)])),
        ):
            if value < 1:
                raise HarnessError(
                    Code.BAD_OPTION, "the number must be positive", where=option, expected="at least 1", actual=value
                )

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Tokens of each prompt, and the new ones that follow it."""
        if self.prompts:
            return tuple((len(prompt.token_ids), prompt.max_new_tokens) for prompt in self.prompts)
        return ((self.num_prompt_tokens, self.max_new_tokens),) * self.batch_size

    @property
    def max_num_tokens(self) -> int:
        """Tokens of all prompts, and one more of each request: what a step may hold at most."""
        return sum(num_prompt for num_prompt, _ in self.lengths) + self.batch_size

    @property
    def notes(self) -> tuple[str, ...]:
        """Lengths where they differ."""
        prompts, new = zip(*self.lengths, strict=True)
        return tuple(
            f"{what} {', '.join(map(str, counts[:8]))}{', ...' * (len(counts) > 8)} tokens: {sum(counts):,} together"
            for what, counts in (("the prompts have", prompts), ("the requests generate", new))
            if len(set(counts)) > 1
        )

    def load(self, vocab_size: int) -> ProfileRequests:
        """Return the requests, the same ones every time, that all arrive at once."""
        return replace(self.mixed_load(vocab_size), late=None)

    def mixed_load(self, vocab_size: int) -> ProfileRequests:
        """Return the load with a late request: a copy of the user's first prompt arrives during decode."""
        *prompts, late = self._prompts(vocab_size)
        limits = tuple(num_new for _, num_new in self.lengths)
        return ProfileRequests(prompts=tuple(prompts), max_new_tokens=limits, late=late)

    def _prompts(self, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        if self.prompts:
            return tuple(prompt.token_ids for prompt in (*self.prompts, self.prompts[0]))
        draw = random.Random(_SEED)
        lengths = [self.num_prompt_tokens] * (self.batch_size + 1)
        return tuple(tuple(draw.randrange(vocab_size) for _ in range(length)) for length in lengths)
