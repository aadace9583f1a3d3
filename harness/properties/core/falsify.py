"""Search for the smallest input that breaks a property of the object that an option names, and report a program."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from hypothesis import Phase, given, reject
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the function here takes
from hypothesis.errors import Flaky, Unsatisfiable, UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from harness.errors import Code, HarnessError
from harness.properties.core.findings import Counterexample, PropertyError, PropertyFinding, RejectedError, Rejections


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """A class, a function, a partial, a bound method or any other object, with the source text that names it."""

    target: Any
    imports: tuple[str, ...]
    """Lines of a program that import it."""
    expression: str
    """The expression that names it after these lines."""

    @classmethod
    def of(cls, named: Any) -> "NamedAdapter":
        """Return an adapter as it is, and find the import of anything else by its module and qualified name."""
        if isinstance(named, cls):
            return named
        if isinstance(named, partial):
            return cls._of_partial(named)
        if inspect.ismethod(named) and not inspect.isclass(named.__self__):
            owner = cls.of(named.__self__)
            return cls(named, owner.imports, f"{owner.expression}.{named.__name__}")
        if inspect.isclass(named) or inspect.isroutine(named):
            return cls.at(f"{named.__module__}:{named.__qualname__}", named)
        made = cls.of(type(named))
        return cls(named, made.imports, f"{made.expression}()")

    @classmethod
    def at(cls, path: str, target: Any) -> "NamedAdapter":
        """Return the adapter that `module:name` names."""
        module, _, name = path.partition(":")
        return cls(target, (f"from {module} import {name.partition('.')[0]}",), name)

    @classmethod
    def _of_partial(cls, named: "partial[Any]") -> "NamedAdapter":
        inner = cls.of(named.func)
        arguments = [inner.expression, *map(repr, named.args)]
        arguments += [f"{name}={value!r}" for name, value in named.keywords.items()]
        imports = dict.fromkeys(("from functools import partial", *inner.imports))
        return cls(named, tuple(imports), f"partial({', '.join(arguments)})")

    @property
    def is_class(self) -> bool:
        """Whether calling it makes an object: a class, or a partial of one."""
        return inspect.isclass(_unwrapped(self.target))

    def declares(self, name: str, default: Any = None) -> Any:
        """Return an optional attribute; a partial has those of its function."""
        return _attribute(self.target, name, default)

    def takes(self, keyword: str) -> bool:
        """Whether the call of the adapter itself has an optional parameter."""
        return takes(self.target, keyword)

    @property
    def hides_parameters(self) -> bool:
        """Whether the call may have optional parameters that its signature does not name."""
        return hides_parameters(self.target)


def takes(function: Callable[..., Any], keyword: str) -> bool:
    """Whether a callable of any kind has a parameter of this name.

    Parameters after `**kwargs`, or of a callable without a readable signature, are those that its attribute `keywords`
    names.
    """
    parameters = _parameters(function)
    if parameters is not None and keyword in parameters:
        return True
    return hides_parameters(function) and keyword in _attribute(function, "keywords", ())


def hides_parameters(function: Callable[..., Any]) -> bool:
    """Whether a callable may have more parameters than its signature names."""
    parameters = _parameters(function)
    return parameters is None or any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values())


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """Return the parameters by name; None if they cannot be read."""
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def _unwrapped(target: Any) -> Any:
    return target.func if isinstance(target, partial) else target  # a partial of a partial is made into one


def _attribute(target: Any, name: str, default: Any) -> Any:
    return getattr(target, name, getattr(_unwrapped(target), name, default))


Input = TypeVar("Input")

PHASES = (Phase.generate, Phase.shrink)
"""Hypothesis shrinks a batch well; it does not shrink a sequence of calls well."""


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
    except Flaky:  # code that reads unwritten memory gets different values each time
        if not last:
            raise _finding(property, "the same choices led to other inputs a second time", "") from None
        what = f"{last[0].what}; the same input a second time did not show it: the code is not deterministic"
        raise _finding(property, what, last[0].program) from None
    return rejections


def _finding(property: str, what: str, program: str) -> PropertyError:
    return PropertyError(PropertyFinding(property=property, what=what, program=program))
