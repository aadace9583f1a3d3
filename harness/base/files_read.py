"""The files that this process has read: a result may be kept for as long as they stay as they are.

Modules are known by `sys.modules`, other files by Python's audit events; what a library opens by itself (safetensors,
tokenizers) is not seen. The standard library and wheels are left out, whose versions say what they are; but not a file
that was written after its wheel was installed.
"""

import hashlib
import os
import stat
import sys
import sysconfig
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

LEFT_OUT = "HARNESS_FILES_READ_BUT"
"""Environment variable with a folder: an engine's process then tells its parent what it has read outside of it."""
_CLOCKS_DIFFER_S = 2.0
_begun_ns = time.time_ns() - 20_000_000  # a file system's clock may be behind by so much
_opened: set[str] = set()
_written: set[str] = set()
_of_others: dict[str, str] = {}


def watch_files() -> None:
    """Note each file that Python opens from now on."""
    sys.addaudithook(_note)


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        with suppress(Exception):  # what is raised here would be raised by `open`
            path, _mode, flags = arguments
            names = _written if int(flags) & (os.O_WRONLY | os.O_RDWR) else _opened  # type: ignore[call-overload]
            names.add(str(Path(os.fsdecode(path)).absolute()))  # type: ignore[arg-type]


def add_files(files: Mapping[str, str] | None, reader: str) -> None:
    """Add what another process has read for this one; None: it ended and did not say, which no other run gives."""
    _of_others.update({reader: uuid.uuid4().hex} if files is None else files)


def files_read() -> dict[str, str]:
    """Return the sha256 of each file that was read, by its path, but of those in the folder `$LEFT_OUT`.

    A file that was written again since this process began has a digest that no other run gives. What other processes
    have read is returned once.
    """
    named = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    skipped = ("/proc/", "/sys/", "/dev/", os.path.join(os.environ.get(LEFT_OUT, os.devnull), ""))  # noqa: PTH118
    data = {file for file in _opened - _written if not file.endswith(".pyc") and not file.startswith(skipped)}
    files = sorted(data | {_absolute(file) for file in named if isinstance(file, str)})
    digests = {file: _digest_as_read(file) for file in files if not _is_versioned(file)}
    digests |= _of_others
    _of_others.clear()
    return {file: digest for file, digest in digests.items() if digest is not None}


def _absolute(file: str) -> str:
    return file if file.startswith(os.sep) else str(Path(file).absolute())


def file_digest(file: str) -> str | None:
    """Return the sha256 of a file in hexadecimal; None if there is none."""
    try:
        with Path(file).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _digest_as_read(file: str) -> str | None:
    with suppress(OSError):
        status = Path(file).stat()
        if stat.S_ISREG(status.st_mode):
            return uuid.uuid4().hex if status.st_ctime_ns > _begun_ns else _digest(file, status.st_ctime_ns)
    return None


@cache
def _digest(file: str, _changed_ns: int) -> str | None:
    return file_digest(file)


def _is_versioned(file: str) -> bool:
    """Whether a file belongs to the standard library, or to a wheel as it was installed."""
    installed = _files_of_wheels().get(file)
    if installed is None:
        return file.startswith(_library()) and "-packages" not in file
    with suppress(OSError):
        return os.stat(file).st_mtime <= installed + _CLOCKS_DIFFER_S  # noqa: PTH116  thousands of files a task
    return False


@cache
def _library() -> tuple[str, ...]:
    return tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))


@cache
def _files_of_wheels() -> dict[str, float]:
    """Return when the wheel of each installed file was installed, by the file's path."""
    folders, times = [Path(item) for item in sys.path if item.endswith("-packages")], dict[str, float]()
    for record in (record for folder in folders for record in folder.glob("*.dist-info/RECORD")):
        with suppress(OSError, UnicodeDecodeError):
            names = [line.partition(",")[0] for line in record.read_text(encoding="utf-8").splitlines()]
            times |= dict.fromkeys((f"{record.parents[1]}{os.sep}{name}" for name in names), record.stat().st_mtime)
    return times
