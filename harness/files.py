"""Files that are written whole or not at all, and what to say where the system refuses."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import Code, HarnessError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses (disk full, no permission, ...) into CANNOT_WRITE."""
    try:
        yield
    except OSError as error:
        raise HarnessError(
            Code.CANNOT_WRITE,
            f"the file cannot be written: {error.strerror or error}",
            where=path,
            hint="free some space or choose another folder",
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8; until all of it is on disk, what was there before stays. Makes missing folders.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
            beside = Path(folder) / path.name
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
