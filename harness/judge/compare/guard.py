"""The guard around code that is only tried: a convention, an explanation. One that raises drops itself and is noted."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import HarnessError

_PACKAGE = Path(__file__).parents[2]
_MAX_LENGTH = 120


@contextmanager
def guarded(name: str, failures: list[str]) -> Iterator[None]:
    """Let nothing that is raised in the block pass but a HarnessError, whose reader has to act.

    Args:
        name: what is tried, for the note.
        failures: takes the note: what was raised, and the file and line of ours that raised it.

    Raises:
        HarnessError: the block raised it: a checkpoint that changed, a recording that is damaged.
    """
    try:
        yield
    except HarnessError:
        raise
    except Exception as error:
        note = f"{name}: {_described(error)}"
        if note not in failures:
            failures.append(note)


def _described(error: Exception) -> str:
    message = str(error).partition("\n")[0][:_MAX_LENGTH]
    return f"{type(error).__name__}{f': {message}' if message else ''} ({_place(error)})"


def _place(error: Exception) -> str:
    """Return file and line of the last call in this package, or of the raise where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents and frame.filename != __file__]
    frame = (own or frames)[-1]
    path = Path(frame.filename)
    return f"{path.relative_to(_PACKAGE.parent) if own else path.name}:{frame.lineno}"
