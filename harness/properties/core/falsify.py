"""Searching for the smallest input that breaks a property, and telling it as a program."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import Phase, given
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the function here takes
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from harness.errors import Code, HarnessError
from harness.properties.core.subject import takes

__all__ = ["Broken", "BrokenPropertyError", "Target", "calling", "falsify"]

Input = TypeVar("Input")

PHASES = (Phase.generate, Phase.shrink)
"""A batch, unlike a sequence of calls, is made smaller by Hypothesis itself."""


class Broken(Exception):  # noqa: N818  # it is what Hypothesis searches for, not an error of ours
    """A property does not hold for an input.

    Attributes:
        what: one sentence with the values that disagree.
        program: plain Python that shows it: it ends in an assertion that fails, or in a call that raises.
    """

    def __init__(self, what: str, program: str) -> None:
        self.what = what
        self.program = program
        super().__init__(what)


class BrokenPropertyError(HarnessError):
    """A property suite's finding, with the smallest input that shows it.

    Attributes:
        property: what ought to hold, in one sentence.
        program: plain Python, nothing in it but torch and the code under test.
    """

    def __init__(self, property: str, broken: Broken) -> None:
        self.property = property
        self.program = broken.program
        super().__init__(Code.PROPERTY_VIOLATED, broken.what, where=property)

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.program}"


class Target:
    """What an option names, a class, a function or any object, and how a program writes it.

    Attributes:
        name: what the program calls the object.
        adapter: the object: a class is called without arguments.
    """

    def __init__(self, named: Any, name: str) -> None:
        self.name = name
        self.adapter: Any = named() if inspect.isclass(named) else named
        self._named = named if inspect.isclass(named) or inspect.isroutine(named) else type(named)

    def offers(self, method: str) -> bool:
        """Whether there is an optional method."""
        return callable(getattr(self.adapter, method, None))

    def takes(self, method: str, keyword: str) -> bool:
        """Whether a method has an optional parameter."""
        return self.offers(method) and takes(getattr(self.adapter, method), keyword)

    def declares(self, name: str, default: Any = None) -> Any:
        """Return an optional attribute."""
        return getattr(self.adapter, name, default)

    def opening(self) -> list[str]:
        """Return the lines of a program that import and make the object."""
        path, name = self._named.__module__, self._named.__qualname__
        imported = f"from {path} import {name.partition('.')[0]}"
        return [imported, "", f"{self.name} = {name}{'' if inspect.isroutine(self._named) else '()'}"]


@contextmanager
def calling(what: str, program: Callable[[], str]) -> Iterator[None]:
    """Count whatever the code under test raises as a broken property: of `what`, shown by `program`."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        raise Broken(f"{what} raised {text}", program()) from error


def falsify(property: str, check: Callable[[Input], None], inputs: SearchStrategy[Input], settings: Settings) -> None:
    """Try `check` on inputs until it raises `Broken` or the examples run out.

    Raises:
        BrokenPropertyError: the smallest input that breaks the property.
    """
    last: list[Broken] = []

    @Settings(settings, phases=PHASES)
    @given(inputs)
    def run(value: Input) -> None:
        try:
            check(value)
        except Broken as broken:
            last[:] = [broken]
            raise

    try:
        run()
    except Broken as broken:
        raise BrokenPropertyError(property, broken) from None
    except Flaky:  # what reads memory that nobody has written finds something else there every time
        now_and_then = Broken(f"{last[0].what}; on some runs, not on all", last[0].program)
        raise BrokenPropertyError(property, now_and_then) from None
