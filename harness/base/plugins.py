"""Entry points by which other packages and the extensions add to the core; and checks for optional packages."""

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


@cache
def entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, sorted.

    Raises:
        HarnessError: EXTENSION_FAILED: two packages use the same name.
    """
    by_name: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        if entry.value != by_name.setdefault(entry.name, entry).value:
            raise HarnessError(
                Code.EXTENSION_FAILED,
                f"several packages define {entry.name!r}",
                where=f"entry points of the group {group!r}",
                actual=f"{by_name[entry.name].value}, {entry.value}",
                hint="uninstall one of the packages",
            )
    return by_name


def load(group: str, name: str) -> Any:
    """Import the object of an entry point.

    Raises:
        HarnessError: EXTENSION_FAILED: no package brings it, or it cannot be imported; whatever HarnessError the import
            raises.
    """
    if name not in entries(group):
        what, hint = f"no package brings the extension {name!r}", "install the harness again"
        raise HarnessError(Code.EXTENSION_FAILED, what, where=f"entry points of the group {group!r}", hint=hint)
    try:
        return entries(group)[name].load()
    except HarnessError:
        raise
    except Exception as error:
        refuse(group, name, f"cannot be imported: {type(error).__name__}: {error}", error)


def load_all(group: str, check: type[T] | Callable[[Any], T]) -> dict[str, T]:
    """Import the objects of all entry points of a group, by their names, in the order of the names.

    Args:
        group: a group, for example `READERS`.
        check: the class of the objects. Or a function that returns what is to be used of an object; it raises TypeError
            for an unsuitable object, with a message that continues "the extension X".

    Raises:
        HarnessError: EXTENSION_FAILED: as `load`, or an object does not pass the check.
    """
    return {name: _checked(group, name, check) for name in entries(group)}


def _checked(group: str, name: str, check: type[T] | Callable[[Any], T]) -> T:
    loaded = load(group, name)
    if isinstance(check, type) and not isinstance(loaded, check):
        refuse(group, name, f"names no {check.__name__}, but {type(loaded).__name__}")
    try:
        return cast(T, loaded) if isinstance(check, type) else check(loaded)
    except TypeError as error:
        refuse(group, name, str(error), error)


def is_ours(group: str, name: str) -> bool:
    """Return whether the harness itself brings an extension: what goes wrong in it is a bug of the harness."""
    return entries(group)[name].value.startswith("harness.")


def refuse(group: str, name: str, problem: str, cause: Exception | None = None) -> NoReturn:
    """Refuse an extension; `problem` continues "the extension X".

    Raises:
        HarnessError: EXTENSION_FAILED.
    """
    raise HarnessError(
        Code.EXTENSION_FAILED,
        f"the extension {name!r} {problem}",
        where=f"{entries(group)[name].value}, an entry point of the group {group!r}",
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
