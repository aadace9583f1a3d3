"""The smallest example that still violates the same invariant.

Hypothesis' own shrinker works on the choices behind an example: a minute, and often a program of fifty lines. Here the
steps that were run are at hand: they are run again without some of them, and with smaller arguments, until nothing can
be left out.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy

from harness.properties.core.actions import ActionMachine, Impossible, Step
from harness.properties.core.findings import Violation

__all__ = ["minimize"]

MOST_REPLAYS = 3_000


def minimize(
    make: Callable[[], ActionMachine], trace: list[Step], violation: Violation
) -> tuple[ActionMachine, Violation]:
    """Return a machine that has run the smallest part of `trace` that violates the same invariant, and how it did.

    Raises:
        Violation: the same steps do not violate it again, so that there is nothing to make smaller.
    """
    machine, found = _replay(make, trace)
    if found is None:
        raise violation
    num_replays, is_smaller = 0, True
    while is_smaller:
        is_smaller = False
        for candidate in _smaller(trace):
            num_replays += 1
            if num_replays > MOST_REPLAYS:
                break
            replayed, again = _replay(make, candidate)
            is_same = again is not None and again.invariant == found.invariant
            if is_same and replayed.subject.num_calls <= machine.subject.num_calls:
                assert again is not None
                machine, found, trace, is_smaller = replayed, again, candidate, True
                break
    return machine, found


def _replay(make: Callable[[], ActionMachine], trace: list[Step]) -> tuple[ActionMachine, Violation | None]:
    machine = make()
    try:
        for name, arguments in deepcopy(trace):
            try:
                machine.run_step(name, arguments)
            except Impossible:
                continue
            machine.holds()
        machine.drains()
    except Violation as violation:
        return machine, violation
    return machine, None


def _smaller(trace: list[Step]) -> Iterator[list[Step]]:
    """Yield examples with fewer steps, then with smaller arguments; what a step cannot work on it refuses itself."""
    size = len(trace) - 1  # the first step is the one that starts the machine
    while size:
        for first in range(len(trace) - size, 0, -size):
            yield trace[:first] + trace[first + size :]
        size //= 2
    yield from _scaled(trace)
    for index, (name, arguments) in enumerate(trace):
        for key, value in arguments.items():
            for smaller in _smaller_values(value, least=0 if index else 1):
                yield [*trace[:index], (name, arguments | {key: smaller}), *trace[index + 1 :]]


def _scaled(trace: list[Step]) -> Iterator[list[Step]]:
    """Yield examples where all lists are shorter and the blocks smaller, or fewer, by the same factor."""
    sizes = trace[0][1]
    if sizes["block_size"] > 1:
        yield _cut(trace, sizes | {"block_size": 1}, 1 / sizes["block_size"])
    for num_blocks in range(1, sizes["num_blocks"]):
        yield _cut(trace, sizes | {"num_blocks": num_blocks}, num_blocks / sizes["num_blocks"])


def _cut(trace: list[Step], sizes: dict[str, int], factor: float) -> list[Step]:
    return [
        ("start", sizes),
        *(
            (name, {key: _cut_value(value, factor) for key, value in arguments.items()})
            for name, arguments in trace[1:]
        ),
    ]


def _cut_value(value: object, factor: float) -> object:
    return value[: max(1, round(len(value) * factor))] if isinstance(value, list) else value


def _smaller_values(value: object, *, least: int) -> Iterator[object]:
    if isinstance(value, list):
        for index in range(len(value)):
            yield value[:index] + value[index + 1 :]
        for index, element in enumerate(value):
            for smaller in _smaller_values(element, least=0):
                yield [*value[:index], smaller, *value[index + 1 :]]
    elif value is True:
        yield False
    elif isinstance(value, int) and value is not False:
        yield from sorted({number for number in (least, value // 2, value - 1) if least <= number < value})
