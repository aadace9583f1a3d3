"""Whether the same calls give the same answers, on instances that are made one after the other.

Where they do not, a failure cannot be repeated, and neither can a bug report. A `set` of objects in a scheduler is
enough: the order of its elements depends on where they lie in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.properties.core.findings import PropertyFinding, RejectedError, Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.machine import Machine, NotApplicable, Step
from harness.properties.core.minimize import smaller_traces
from harness.properties.core.subject import Call

MOST_RUNS = 400
RUNS_OF_ONE = 4
"""Runs of a shorter example before it counts as giving the same answers."""
RUNS_IF_CERTAIN = 5
"""Further runs of each sample where the search has seen a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredExample:
    """An example, and what the code under test answered."""

    trace: Sequence[Step]
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDifference:
    """Two runs of an example, up to the call that they answer differently."""

    trace: Sequence[Step]
    machine: Machine
    index: int
    answers: tuple[str, str]


def difference(
    make: Callable[[], Machine], samples: Sequence[AnsweredExample], *, is_certain: bool = False
) -> PropertyFinding | None:
    """Run samples a second time, and return the shortest example whose answers differ; None if there is none.

    `is_certain`: the search has met a difference already, so that one is reported even if it does not come again.
    """
    runs = [sample for _ in range(RUNS_IF_CERTAIN if is_certain else 1) for sample in samples]
    found = next(filter(None, (_compare(make, sample) for sample in runs)), None)
    if found is not None:
        return _finding(_smallest(make, found))
    if not is_certain:
        return None
    what = "an example was run twice and did not take the same course; no second run of another one showed where"
    return PropertyFinding.of(
        Violation(Invariant.DETERMINISM, what), "# no program: the difference did not come again\n"
    )


def _compare(make: Callable[[], Machine], sample: AnsweredExample) -> CallDifference | None:
    machine = _run(make, sample.trace)
    if machine is None:
        return None
    for index, (first, second) in enumerate(zip(sample.calls, machine.subject.calls, strict=False)):
        if first.source == second.source and first.answer != second.answer:
            return CallDifference(
                trace=sample.trace, machine=machine, index=index, answers=(_told(first), _told(second))
            )
    return None


def _smallest(make: Callable[[], Machine], found: CallDifference) -> CallDifference:
    num_runs, is_smaller = 0, True
    while is_smaller and num_runs < MOST_RUNS:
        is_smaller = False
        for trace in smaller_traces(found.machine):
            num_runs += RUNS_OF_ONE
            again = _differs(make, trace)
            if again is not None and again.index < found.index:
                found, is_smaller = again, True
                break
            if num_runs > MOST_RUNS:
                break
    return found


def _differs(make: Callable[[], Machine], trace: Sequence[Step]) -> CallDifference | None:
    first = _run(make, trace)
    if first is None:
        return None
    sample = AnsweredExample(trace=trace, calls=first.subject.calls)
    return next(filter(None, (_compare(make, sample) for _ in range(RUNS_OF_ONE))), None)


def _run(make: Callable[[], Machine], trace: Sequence[Step]) -> Machine | None:
    machine = make()
    machine.wanted = ()
    try:
        machine.run(trace)
    except Violation:
        pass
    except (NotApplicable, RejectedError):
        return None
    return machine


def _finding(found: CallDifference) -> PropertyFinding:
    subject, (first, second) = found.machine.subject, found.answers
    calls = subject.calls[: found.index + 1]
    what = f"{calls[-1].source} gave {first} in one run and {second} in another, after the same calls"
    *opening, made = subject.opening
    lines = [
        *opening,
        "def run():",
        f"    {made}",
        *(f"    {line}" for call in calls[:-1] for line in _attempt(call)),
        f"    return {calls[-1].source}",
        "",
        f"# {first} in one run, {second} in another",
        "answers = [run() for _ in range(1000)]",
        "assert all(answer == answers[0] for answer in answers)",
    ]
    return PropertyFinding.of(Violation(Invariant.DETERMINISM, what), "\n".join(lines) + "\n")


def _attempt(call: Call) -> list[str]:
    if call.result is not None:
        return [call.source]
    return ["try:", f"    {call.source}", "except Exception as error:", "    print(error)"]


def _told(call: Call) -> str:
    return "an error" if call.result is None else call.result
