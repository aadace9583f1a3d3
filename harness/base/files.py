"""Files that are written whole or not at all, files that are read up to a size, and what to say where that fails."""

import errno
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.base.scratch import scratch_folder
from harness.errors import Code, HarnessError

MOST_BYTES = 1 << 28
"""Largest file of text that is read: no manifest, config or case comes near it."""
_WAIT_S = 60.0
_CHUNK_BYTES = 1 << 20


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file, or of a pipe; a device without end is not read to its end.

    Raises:
        OSError: as `Path.read_bytes`; EFBIG for more than `most_bytes`; ETIMEDOUT for a pipe that stays silent.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait for a writer
    try:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        content = bytearray()
        while len(content) <= most_bytes:
            if not is_regular and not select.select([descriptor], [], [], _WAIT_S)[0]:
                raise OSError(errno.ETIMEDOUT, "nothing comes from it", str(path))
            data = os.read(descriptor, _CHUNK_BYTES)
            if not data:
                return bytes(content)
            content += data
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
    finally:
        os.close(descriptor)


def read_text(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the content of a file of UTF-8, as `read_bytes`."""
    return read_bytes(path, most_bytes=most_bytes).decode("utf-8")


def exists(path: Path) -> bool:
    """Return whether a path exists: one that no file can have, for it is too long, does not."""
    try:
        return path.exists()
    except OSError:
        return False


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
    """Write a text as UTF-8; until all of it is written, what was there before stays. Makes missing folders.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".writing-", path.parent) as folder:
            beside = folder / path.name
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)
