"""What other packages and the extensions add to the core: objects named by entry points."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from harness.errors import Code, HarnessError

ENGINES = "inference_harness.engines"
"""Functions that open an engine on a checkpoint (`harness.engines.OpenEngine`)."""
COMMANDS = "inference_harness.commands"
"""Commands of the command line (`harness.command.entry.Command`)."""
READERS = "inference_harness.readers"
"""Readers of checkpoints that are not in HuggingFace's layout (`harness.formats.checkpoint.locate.Reader`)."""
CONVENTIONS = "inference_harness.conventions"
"""Modules with `CONVENTIONS`: legitimate orders of rounding (`harness.judge.compare.conventions`)."""
EXPLANATIONS = "inference_harness.explanations"
"""Modules with `EXPLANATIONS`, ways to get an operation wrong by its kind (`harness.judge.explain`)."""
FUNCTIONS = "inference_harness.functions"
"""Attributes of the package `harness`: `harness.rollout`."""


@cache
def entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by their names, in the order of the names.

    Raises:
        HarnessError: EXTENSION_FAILED: two packages use one name.
    """
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        if entry.value != found.setdefault(entry.name, entry).value:
            raise HarnessError(
                Code.EXTENSION_FAILED,
                f"several packages bring {entry.name!r}",
                where=f"entry points of the group {group!r}",
                actual=f"{found[entry.name].value}, {entry.value}",
                hint="uninstall one of the packages",
            )
    return found


def load(group: str, name: str) -> Any:
    """Import the object of an entry point.

    Raises:
        HarnessError: EXTENSION_FAILED: it cannot be imported; whatever HarnessError the import raises.
    """
    entry = entries(group)[name]
    try:
        return entry.load()
    except HarnessError:
        raise
    except Exception as error:
        raise HarnessError(
            Code.EXTENSION_FAILED,
            f"the extension {name!r} cannot be imported: {type(error).__name__}: {error}",
            where=f"{entry.value}, an entry point of the group {group!r}",
            hint="repair or uninstall the package that brings it",
        ) from error


def load_all(group: str) -> list[Any]:
    """Import the objects of all entry points of a group, in the order of their names."""
    return [load(group, name) for name in entries(group)]
