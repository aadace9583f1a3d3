"""Searching for the smallest input that breaks a property, and telling it as a program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hypothesis import Phase, given, reject
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the function here takes
from hypothesis.errors import Flaky, Unsatisfiable, UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from harness.errors import Code, HarnessError
from harness.properties.core.adapter import NamedAdapter, hides_parameters, takes
from harness.properties.core.findings import Counterexample, PropertyError, PropertyFinding, RejectedError, Rejections

Input = TypeVar("Input")

PHASES = (Phase.generate, Phase.shrink)
"""A batch, unlike a sequence of calls, is made smaller by Hypothesis itself."""


class Target:
    """The code under test of a suite of single calls, and how a program writes it.

    Attributes:
        name: what the program calls the object.
        adapter: the object: a class is called without arguments.
    """

    def __init__(self, named: Any, name: str) -> None:
        self.name = name
        self._source = NamedAdapter.of(named)
        target = self._source.target
        self.adapter: Any = target() if self._source.is_class else target

    def offers(self, method: str) -> bool:
        """Whether there is an optional method."""
        return callable(getattr(self.adapter, method, None))

    def takes(self, method: str, keyword: str) -> bool:
        """Whether a method has an optional parameter; `__call__` is the object itself."""
        function = self._function(method)
        return takes(function, keyword) or (hides_parameters(function) and keyword in self.declares("keywords", ()))

    def hides_parameters(self, method: str) -> bool:
        """Whether a method may have optional parameters that neither its signature nor `keywords` names."""
        return hides_parameters(self._function(method)) and self.declares("keywords") is None

    def declares(self, name: str, default: Any = None) -> Any:
        """Return an optional attribute."""
        return getattr(self.adapter, name, self._source.declares(name, default))

    def opening(self) -> list[str]:
        """Return the lines of a program that import and make the object."""
        call = "()" if self._source.is_class else ""
        return [*self._source.imports, "", f"{self.name} = {self._source.expression}{call}"]

    def _function(self, method: str) -> Any:
        # A function's own `__call__` has the signature (*args, **kwargs), whatever the function takes.
        return self.adapter if method == "__call__" else getattr(self.adapter, method)


@contextmanager
def calling(what: str, program: Callable[[], str]) -> Iterator[None]:
    """Count any exception of the code under test as a broken property: of `what`, shown by `program`.

    NotImplementedError and Hypothesis' `reject` say that it does not serve the input.
    """
    try:
        yield
    except (NotImplementedError, UnsatisfiedAssumption) as error:
        raise RejectedError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        raise Counterexample(f"{what} raised {text}", program()) from error


def falsify(
    property: str, check: Callable[[Input], None], inputs: SearchStrategy[Input], settings: Settings
) -> Rejections:
    """Try `check` on inputs until it raises `Counterexample` or the examples run out; count what is rejected.

    Raises:
        PropertyError: the smallest input that breaks the property.
        HarnessError: NOTHING_CHECKED: the adapter rejected all inputs.
    """
    last: list[Counterexample] = []
    rejections = Rejections()

    @Settings(settings, phases=PHASES)
    @given(inputs)
    def run(value: Input) -> None:
        try:
            check(value)
        except Counterexample as broken:
            last[:] = [broken]
            raise
        except RejectedError as error:
            rejections[str(error)] += 1
            reject()

    try:
        run()
    except Counterexample as broken:
        raise _finding(property, broken.what, broken.program) from None
    except Unsatisfiable:
        raise HarnessError(
            Code.NOTHING_CHECKED, "the adapter rejected every input", where=property,
            actual=rejections.most_common(1)[0][0] if rejections else None, hint="declare what it serves",
        ) from None  # fmt: skip
    except Flaky:  # what reads memory that was never written finds something else there every time
        if not last:
            raise _finding(property, "the same choices led to other inputs a second time", "") from None
        what = f"{last[0].what}; the same input a second time did not show it: the code is not deterministic"
        raise _finding(property, what, last[0].program) from None
    return rejections


def _finding(property: str, what: str, program: str) -> PropertyError:
    return PropertyError(PropertyFinding(property=property, what=what, program=program))
