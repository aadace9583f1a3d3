"""Entry points by which other packages and the extensions add to the core; and checks for optional packages."""

import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar, cast

from harness.errors import Code, HarnessError

T = TypeVar("T")
ENGINES = "inference_harness.engines"
"""Functions that open an engine on a checkpoint (`harness.engines.OpenEngine`)."""
COMMANDS = "inference_harness.commands"
"""Commands of the command line (`harness.command.entry.CommandEntry`)."""
READERS = "inference_harness.readers"
"""Readers of checkpoints that are not in HuggingFace's layout (`harness.formats.checkpoint.locate.Reader`)."""
CONVENTIONS = "inference_harness.conventions"
"""Modules with `CONVENTIONS`: correct alternatives in the order of rounding (`harness.judge.compare.conventions`)."""
EXPLANATIONS = "inference_harness.explanations"
"""Modules with `EXPLANATIONS`: possible mistakes by kind of operation (`harness.judge.explain`)."""
FUNCTIONS = "inference_harness.functions"
"""Functions that become attributes of the package `harness`, for example `harness.rollout`."""


def names(group: str) -> list[str]:
    """Return the names of a group's entry points, sorted."""
    return list(_by_name(group, tuple(sys.path)))


@cache
def _by_name(group: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """Return the entry points by name, sorted: several if packages use the same name.

    `path` is `sys.path`: another one has other packages.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for point in sorted(entry_points(group=group), key=lambda point: (point.name, point.value)):
        points = by_name.setdefault(point.name, [])
        if not points or points[-1].value != point.value:
            points.append(point)
    return by_name


def entry(group: str, name: str) -> EntryPoint:
    """Return the entry point of a group with this name.

    Raises:
        HarnessError: no package has it, or several packages do: UNKNOWN_ENGINE in the group of engines, else
            EXTENSION_FAILED.
    """
    points = _by_name(group, tuple(sys.path)).get(name, [])
    if len(points) == 1:
        return points[0]
    code, noun = (Code.UNKNOWN_ENGINE, "engine") if group == ENGINES else (Code.EXTENSION_FAILED, "extension")
    where = f"entry points of the group {group!r}"
    if points:
        what, actual = f"several {noun}s are called {name!r}", ", ".join(point.value for point in points)
        raise HarnessError(code, what, where=where, actual=actual, hint="uninstall one of the packages")
    what, expected = f"no {noun} is called {name!r}", ", ".join(names(group))
    hint = "install the package that provides it"
    if group == ENGINES:
        hint += ", or give harness.check() an object that computes steps: docs/check-any-engine.md"
    raise HarnessError(code, what, where=where, expected=expected, actual=name, hint=hint)


def load(group: str, name: str, check: type[T] | Callable[[Any], T]) -> T:
    """Import the object of an entry point.

    Args:
        group: a group, for example `READERS`.
        name: the entry point's name.
        check: the class of the object. Or a function that returns what is to be used of an object; it raises TypeError
            for an unsuitable object, with a message that continues "the extension X".

    Raises:
        HarnessError: EXTENSION_FAILED: no package brings it, it cannot be imported, or it does not pass the check;
            whatever HarnessError the import raises.
    """
    point = entry(group, name)
    try:
        loaded = point.load()
    except HarnessError:
        raise
    except Exception as error:
        refuse(group, name, f"cannot be imported: {type(error).__name__}: {error}", error)
    if isinstance(check, type) and not isinstance(loaded, check):
        refuse(group, name, f"names no {check.__name__}, but {type(loaded).__name__}")
    try:
        return cast(T, loaded) if isinstance(check, type) else check(loaded)
    except TypeError as error:
        refuse(group, name, str(error), error)


def load_all(group: str, check: type[T] | Callable[[Any], T]) -> dict[str, T]:
    """Import the objects of all entry points of a group, by their names, in the order of the names; see `load`."""
    return {name: load(group, name, check) for name in names(group)}


def is_ours(group: str, name: str) -> bool:
    """Return whether the harness itself brings an extension: what goes wrong in it is a bug of the harness."""
    points = _by_name(group, tuple(sys.path)).get(name, [])
    return any(point.value.startswith("harness.") for point in points)


def refuse(group: str, name: str, problem: str, cause: Exception | None = None) -> NoReturn:
    """Refuse an extension; `problem` continues "the extension X".

    Raises:
        HarnessError: EXTENSION_FAILED.
    """
    raise HarnessError(
        Code.EXTENSION_FAILED,
        f"the extension {name!r} {problem}",
        where=f"{entry(group, name).value}, an entry point of the group {group!r}",
        hint="repair or uninstall the package that brings it",
    ) from cause


def require_hypothesis(what: str, where: str) -> None:
    """Check that Hypothesis is installed, which `what` needs at `where`.

    Raises:
        HarnessError: NO_HYPOTHESIS.
    """
    if find_spec("hypothesis") is None:
        hint = "pip install -e '.[test]' in the harness's checkout"
        raise HarnessError(Code.NO_HYPOTHESIS, f"{what} needs Hypothesis", where=where, hint=hint)
