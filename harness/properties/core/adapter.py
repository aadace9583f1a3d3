"""The object that an option names: how a program imports it, and its declarations about itself."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any


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
