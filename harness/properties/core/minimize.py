"""The smallest example that still violates an invariant: the fewest calls, then the shortest arguments.

Hypothesis' own shrinker works on the choices behind an example: it takes a minute and often leaves a program of fifty
lines. Here the recorded steps are run again without some of them, and with smaller arguments, until nothing can be
left out.

A failure that depends on more than the calls cannot be repeated, and neither can a bug report: a `set` of objects in a
scheduler is enough, since the order of its elements depends on addresses. So the calls are also run on several
instances, whose answers are compared.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.properties.core.findings import Invariant, PropertyFinding, RejectedError, Violation
from harness.properties.core.machine import Machine, NotApplicable, Step
from harness.properties.core.subject import Call

MOST_REPLAYS = 4_000
LONG = 32

Trace = Sequence[Step]
Cost = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """An example that has been run, and the invariant that it violates."""

    machine: Machine
    violation: Violation

    @property
    def trace(self) -> Trace:
        """The steps that were run."""
        return self.machine.trace

    @property
    def cost(self) -> Cost:
        """The size that shrinking makes small: calls, then the numbers in their arguments, then their sum."""
        numbers = [number for _, arguments in self.trace for value in arguments.values() for number in _numbers(value)]
        return len(self.machine.subject.calls), len(numbers), sum(numbers)


def minimize(
    make: Callable[[], Machine], trace: Trace, invariant: Invariant, *, hangs: bool = False
) -> Smallest | None:
    """Return the smallest part of an example that violates the same invariant; None if it does not do so again.

    `hangs`: its last call does not return; otherwise a call that takes too long is no example of it.
    """
    smallest = _replay(make, trace, invariant, hangs)
    num_replays, is_smaller = 0, smallest is not None
    while smallest is not None and is_smaller:
        is_smaller = False
        for candidate in smaller_traces(smallest.machine):
            num_replays += 1
            if num_replays > MOST_REPLAYS:
                return smallest
            again = _replay(make, candidate, invariant, hangs)
            if again is not None and again.cost < smallest.cost:
                smallest, is_smaller = again, True
                break
    return smallest


def _replay(make: Callable[[], Machine], trace: Trace, invariant: Invariant, hangs: bool) -> Smallest | None:
    machine = make()
    machine.wanted = (invariant,)
    try:
        machine.run(trace)
    except Violation as violation:
        is_same = violation.invariant == invariant and violation.hangs == hangs
        return Smallest(machine=machine, violation=violation) if is_same else None
    except (NotApplicable, RejectedError):
        return None
    return None


def smaller_traces(machine: Machine) -> Iterator[list[Step]]:
    """Yield examples with fewer steps than a machine has run, then with smaller arguments."""
    trace = machine.trace
    yield from _without_steps(trace)
    yield from _longer_instead_of_steps(trace, machine.lengthened)
    served = machine.served_sizes()
    yield from _larger_instead_of_steps(trace, machine.enlarged, served)
    yield from _scaled(trace, machine.request_arguments, served)
    yield [("start", trace[0][1] | dict.fromkeys(trace[0][1].keys() & machine.unusual)), *trace[1:]]
    yield from _with_equal_tokens(trace)
    yield _renumbered(trace, machine.request_arguments)
    for key, size in trace[0][1].items():
        for smaller in _smaller_sizes(size, served[key]) if key in served else _smaller_values(size, least=1):
            yield [("start", trace[0][1] | {key: smaller}), *trace[1:]]
    for index, (name, arguments) in enumerate(trace[1:], start=1):
        for key in sorted(arguments.keys() - machine.request_arguments):
            for smaller in _smaller_values(arguments[key], least=0):
                yield [*trace[:index], (name, arguments | {key: smaller}), *trace[index + 1 :]]


def _without_steps(trace: Trace) -> Iterator[list[Step]]:
    """Yield examples without a run of steps, long ones first; the first step starts the machine."""
    size = len(trace) - 1
    while size:
        for first in range(len(trace) - size, 0, -size):
            yield [*trace[:first], *trace[first + size :]]
        size //= 2


def _longer_instead_of_steps(trace: Trace, lengthened: Mapping[str, str]) -> Iterator[list[Step]]:
    """Yield examples where one request, or each, begins with more tokens, and one or two steps are left out for it."""
    starts = [index for index, (name, _) in enumerate(trace) if name in lengthened]
    for which in [*([index] for index in starts), *([starts] if len(starts) > 1 else [])]:
        for number in (1, 2, 3):
            longer = [_lengthened(step, lengthened, number * (at in which)) for at, step in enumerate(trace)]
            for left_out in range(which[0] + 1, len(trace)):
                yield longer[:left_out] + longer[left_out + 1 :]
                yield longer[:left_out] + longer[left_out + 2 :]


def _larger_instead_of_steps(
    trace: Trace, enlarged: Collection[str], served: Mapping[str, Sequence[int]]
) -> Iterator[list[Step]]:
    """Yield examples where a size of the start is as large as it may be, and some later steps are left out for it."""
    sizes = trace[0][1]
    for key in sorted(sizes.keys() & enlarged):
        largest: Step = ("start", sizes | {key: max(served[key])})
        for number in (4, 3, 2, 1) if sizes[key] < max(served[key]) else ():
            for first in range(1, len(trace) - number + 1):
                yield [largest, *trace[1:first], *trace[first + number :]]


def _lengthened(step: Step, lengthened: Mapping[str, str], number: int) -> Step:
    name, arguments = step
    key = lengthened.get(name)
    return step if key is None else (name, arguments | {key: arguments[key] + [0] * number})


def _renumbered(trace: Trace, request_arguments: Collection[str]) -> list[Step]:
    """Return the example with its requests numbered from 0 in the order in which they come."""
    numbers: dict[int, int] = {}
    for _, arguments in trace:
        for key in arguments.keys() & request_arguments:
            numbers.setdefault(arguments[key], len(numbers))
    return [
        (name, {key: numbers[value] if key in request_arguments else value for key, value in arguments.items()})
        for name, arguments in trace
    ]


def _smaller_sizes(size: int, served: Iterable[int]) -> list[int]:
    """Return some of the served sizes below one: the smallest, those next to it, and one in the middle."""
    smaller = sorted({served_size for served_size in served if served_size < size})
    return sorted({*smaller[:1], *smaller[len(smaller) // 2 :][:1], *smaller[-2:]})


def _scaled(
    trace: Trace, request_arguments: Collection[str], served: Mapping[str, Sequence[int]]
) -> Iterator[list[Step]]:
    """Yield examples where the blocks are smaller, or fewer, and all lists, or all numbers too, by the same factor."""
    sizes = trace[0][1]
    for key in ("block_size", "num_blocks"):
        size = sizes.get(key, 1)
        for smaller in _smaller_sizes(size, served.get(key, range(1, size))):
            factor = smaller / size
            yield [("start", sizes | {key: smaller}), *_cut(trace[1:], factor, request_arguments, has_numbers=False)]
            start, *steps = _cut(trace, factor, request_arguments, has_numbers=True)
            yield [("start", start[1] | {key: smaller}), *steps]


def _cut(steps: Trace, factor: float, request_arguments: Collection[str], *, has_numbers: bool) -> list[Step]:
    def cut(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return value[: max(1, round(len(value) * factor))]
        is_number = isinstance(value, int) and not isinstance(value, bool) and key not in request_arguments
        return max(1, round(value * factor)) if has_numbers and is_number and value > 1 else value

    return [(name, {key: cut(key, value) for key, value in arguments.items()}) for name, arguments in steps]


def _with_equal_tokens(trace: Trace) -> Iterator[list[Step]]:
    """Yield examples where one token takes the place of another in all lists at once."""
    tokens = sorted({number for _, arguments in trace for value in arguments.values() for number in _listed(value)})
    for token in tokens[1:]:
        for replacement in (tokens[0], 0):
            yield [
                (name, {key: [replacement if x == token else x for x in value] if isinstance(value, list) else value
                        for key, value in arguments.items()})
                for name, arguments in trace
            ]  # fmt: skip


def _smaller_values(value: object, *, least: int) -> Iterator[object]:
    if isinstance(value, list):
        yield from _smaller_lists(value)
    elif value is True:
        yield False
    elif isinstance(value, int) and value is not False:
        yield from sorted({number for number in (least, value // 2, value - 1) if least <= number < value})


def _smaller_lists(values: list[Any]) -> Iterator[list[Any]]:
    """Yield lists without some elements; of long lists, whose elements are mostly equal, without some at the end."""
    is_long = len(values) > LONG
    for size in _cuts(len(values)):
        if not is_long or size * 8 > len(values):
            for first in range(0, len(values), size):
                yield values[:first] + values[first + size :]
        else:
            yield values[:-size]
    for index, element in enumerate(() if is_long else values):
        for smaller in _smaller_values(element, least=0):
            yield [*values[:index], smaller, *values[index + 1 :]]


def _cuts(size: int) -> list[int]:
    """Return how many elements to leave out: all, then powers of two, since most blocks have such a size."""
    return [size, *(1 << power for power in reversed(range((size - 1).bit_length())))] if size else []


def _numbers(value: object) -> list[int]:
    return [int(value)] if isinstance(value, int) else _listed(value)


def _listed(value: object) -> list[int]:
    return [int(element) for element in value] if isinstance(value, list) else []


MOST_RUNS = 400
RUNS_OF_ONE = 4
"""Runs of a shorter example before it counts as giving the same answers."""
RUNS_IF_CERTAIN = 5
"""More runs of each sample after the search has seen a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredExample:
    """An example with the answers of the code under test."""

    trace: Sequence[Step]
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDifference:
    """Two runs of an example, up to the call whose answers differ."""

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
    differing = next(filter(None, (_compare(make, sample) for sample in runs)), None)
    if differing is not None:
        return _finding(_smallest(make, differing))
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


def _smallest(make: Callable[[], Machine], smallest: CallDifference) -> CallDifference:
    num_runs, is_smaller = 0, True
    while is_smaller and num_runs < MOST_RUNS:
        is_smaller = False
        for trace in smaller_traces(smallest.machine):
            num_runs += RUNS_OF_ONE
            again = _differs(make, trace)
            if again is not None and again.index < smallest.index:
                smallest, is_smaller = again, True
                break
            if num_runs > MOST_RUNS:
                break
    return smallest


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


def _finding(difference: CallDifference) -> PropertyFinding:
    subject, (first, second) = difference.machine.subject, difference.answers
    calls = subject.calls[: difference.index + 1]
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
