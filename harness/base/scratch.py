"""Folders that are gone when their block ends, and those of processes that were killed, which are swept up."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = ".scratch"
"""File in each such folder, locked while its process lives. A folder without it belongs to another program."""
_SWEPT_AFTER_S = 60.0
"""Age from which a folder is swept whose mark is empty: it was never locked."""


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for the block, and remove what killed processes left of the same kind in the same place.

    Args:
        prefix: of its name.
        parent: the folder it is made in; None for the system's own for temporary files.

    Raises:
        OSError: it cannot be made.
    """
    place = Path(tempfile.gettempdir()) if parent is None else parent
    sweep(place, prefix)
    folder = tempfile.TemporaryDirectory(dir=place, prefix=prefix, ignore_cleanup_errors=True)
    try:
        with (Path(folder.name) / MARK).open("w") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX)
            print("locked", file=mark, flush=True)
            yield Path(folder.name)
    finally:
        try:
            folder.cleanup()
        except BaseException:  # an interrupt in the midst of it
            shutil.rmtree(folder.name, ignore_errors=True)
            raise


def sweep(place: Path, prefix: str) -> None:
    """Remove the scratch folders of processes that are no more."""
    with suppress(OSError):
        for folder in place.glob(f"{prefix}*"):
            with suppress(OSError):
                _sweep(folder)


def _sweep(folder: Path) -> None:
    descriptor = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        mark = os.fstat(descriptor)
        if mark.st_size or time.time() - mark.st_mtime > _SWEPT_AFTER_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or it lives
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)
