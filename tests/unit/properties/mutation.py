"""Small changes to methods of the reference engine's pool, prefix cache, block manager and scheduler."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    name: str
    target: Any
    """A method."""
    changes: tuple[tuple[str, str], ...]
    """Pieces of its source and what stands there instead."""
    killed_by: frozenset[int]
    """Invariants that the suite may name: which one it meets first depends on the example."""
    also: tuple[tuple[Any, tuple[tuple[str, str], ...]], ...] = ()
    """Further methods, where one is not enough."""

    @property
    def owner(self) -> type:
        """The class that is changed."""
        return _owner(self.target)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Change the methods, and put them back."""
        with pytest.MonkeyPatch.context() as patch:
            for target, changes in ((self.target, self.changes), *self.also):
                patch.setattr(_owner(target), target.__name__, _mutated(target, changes))
            yield


def _owner(target: Any) -> type:
    return target.__globals__[target.__qualname__.partition(".")[0]]


def _mutated(target: Any, changes: tuple[tuple[str, str], ...]) -> Any:
    source = textwrap.dedent(inspect.getsource(target))
    for old, new in changes:
        assert source.count(old) == 1, f"{target.__qualname__} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, target.__globals__, namespace)
    return namespace[target.__name__]


def mutant(
    name: str, target: Any, *changes: tuple[str, str], killed_by: int | tuple[int, ...], also: Any = ()
) -> Mutant:
    invariants = frozenset((killed_by,) if isinstance(killed_by, int) else killed_by)
    return Mutant(name=name, target=target, changes=changes, killed_by=invariants, also=also)
