"""Files that are written whole or not at all, files and JSON of others, and folders that vanish with their block.

JSON is read as Python's reader does, except for nestings that would exhaust the stack of whoever walks over them.
"""

import errno
import fcntl
import hashlib
import json
import os
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError

MARK = ".scratch"
"""File in each such folder, locked while its process lives. A folder without it belongs to another program."""
_SWEPT_AFTER_S = 60.0
"""Age from which a folder with an empty, never locked mark is removed."""


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Make a folder for the block, and remove folders of the same kind that killed processes left.

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
    """Remove the scratch folders of processes that have ended."""
    with suppress(OSError):
        for folder in place.glob(f"{prefix}*"):
            with suppress(OSError):
                _sweep(folder)


def _sweep(folder: Path) -> None:
    descriptor = os.open(folder / MARK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        mark = os.fstat(descriptor)
        if mark.st_size or time.time() - mark.st_mtime > _SWEPT_AFTER_S:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # otherwise its process is alive
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)


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
    """Return whether a path exists; a path that is too long for a file does not."""
    try:
        return path.exists()
    except OSError:
        return False


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system (disk full, no permission, ...) into CANNOT_WRITE."""
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
    """Write a text as UTF-8; the old file stays until all of the text is written. Makes missing folders.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(".writing-", path.parent) as folder:
            beside = folder / path.name
            beside.write_text(text, encoding="utf-8")
            beside.replace(path)


MOST_NESTED = 100
"""The deepest nesting of lists and objects that is read: no config, trace or answer comes near it."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, has a number of more than 4,300 digits, or is nested deeper than `MOST_NESTED`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MOST_NESTED:  # type: ignore[arg-type]
        _check_depth(value)
    return value


def json_digest(value: Any) -> str:
    """Return the sha256 of a value as JSON, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_NESTED):
        level = [member for container in level for member in _members(container) if isinstance(member, dict | list)]
        if not level:
            return
    raise _too_deep()


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_NESTED} levels")
