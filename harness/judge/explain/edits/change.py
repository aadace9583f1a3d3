"""A change of the model, which is made for the time of a trial."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

LIKELY, POSSIBLE, UNLIKELY = range(3)
"""Ranks by how many mistakes a trial names. Changes that an operation has, and how many of 213 faults they named:

- likely: what is left out, a part or an operator, a branch, 74 changes, 75; parameters, 38, 83; a factor, 15, 37
- possible: settings, numbers, arguments, the value of a variable, 212 changes, 10
- unlikely: another variable, 367 changes, 3; a statement that is moved, 75, 2; what is rounded, 71, 3
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldChange:
    """A change in words."""

    cause: str
    detail: str = ""


Make = Callable[[float], AbstractContextManager[Any]]
"""See `ModelChange.make`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """One change of the code that a module runs, or of what it holds."""

    module: str
    """Path of the innermost module that it concerns."""
    rank: int
    make: Make
    """Makes it for the duration of a block, by the number that is fitted in it.

    Raises:
        SyntaxError, ValueError: it cannot be made.
    """
    tell: Callable[[float], ToldChange]
    is_fitted: bool = False
    leaves: float = 0.0
    """Share of the error that it may leave: numbers near the middle of two of a coarser format fall to either."""
    is_vague: bool = False
    """Whether it has no term of the field: what has one and fits as well comes first."""


def likely_change(cause: str, make: Make, *, module: str = "", leaves: float = 0.0) -> ModelChange:
    """Return a change with nothing to fit, of a module or of the whole model; see `ModelChange`."""
    return ModelChange(
        module=module, rank=LIKELY, make=make, tell=lambda _factor: ToldChange(cause=cause), leaves=leaves
    )


@contextmanager
def all_made(makes: Sequence[Make], factor: float) -> Iterator[None]:
    """Make several changes for the duration of a block."""
    with ExitStack() as stack:
        for make in makes:
            stack.enter_context(make(factor))
        yield
