"""The files that this process has read: a result may be kept for as long as they stay as they are.

Modules are known by `sys.modules`, other files by Python's audit events; what a library opens by itself (safetensors,
tokenizers) is not seen. The standard library and the files of wheels are left out, whose versions say what they are;
but not a file that was written after its wheel was installed.
"""

import hashlib
import os
import sys
import sysconfig
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

REPORTING = "HARNESS_FILES_READ"
"""Environment variable under which an engine's process tells its parent what it has read."""
_begun_ns = time.time_ns()
_TICK_NS = 20_000_000
"""How far a file system's clock may be behind."""
_LAST_WRITES_S = 2.0
"""Time after the list of a wheel's files in which its files may still be written."""
_NO_FILES = ("/proc/", "/sys/", "/dev/")
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
            is_written = int(flags) & (os.O_WRONLY | os.O_RDWR)  # type: ignore[call-overload]
            (_written if is_written else _opened).add(os.path.abspath(os.fsdecode(path)))  # type: ignore[arg-type]  # noqa: PTH100


def add_files(files: Mapping[str, str]) -> None:
    """Add what another process has read for this one."""
    _of_others.update(files)


def files_read(*left_out: Path) -> dict[str, str]:
    """Return the sha256 of each file that was read, by its path, in hexadecimal.

    A file that was written again since this process began has a digest that no other run gives.

    Args:
        left_out: folders whose files do not count.
    """
    named = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    modules = {os.path.abspath(file) for file in named if isinstance(file, str)}  # noqa: PTH100
    skipped = (*_NO_FILES, *(f"{folder.absolute()}{os.sep}" for folder in left_out))
    data = {file for file in _opened - _written if not file.endswith(".pyc") and not file.startswith(skipped)}
    digests = {file: _digest_as_read(file) for file in sorted(modules | data) if not _is_versioned(file)}
    return {file: digest for file, digest in digests.items() if digest is not None} | _of_others


def file_digest(file: str) -> str | None:
    """Return the sha256 of a file in hexadecimal; None if there is none."""
    try:
        with Path(file).open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return None


def _digest_as_read(file: str) -> str | None:
    try:
        status = Path(file).stat()
    except OSError:
        return None
    is_changed = status.st_ctime_ns > _begun_ns - _TICK_NS
    return uuid.uuid4().hex if is_changed else _digest(file, status.st_ctime_ns)


@cache
def _digest(file: str, _changed_ns: int) -> str | None:
    return file_digest(file) if Path(file).is_file() else None


def _is_versioned(file: str) -> bool:
    """Whether a file belongs to the standard library, or to a wheel as it was installed."""
    installed_s = _files_of_wheels().get(file)
    if installed_s is not None:
        with suppress(OSError):
            return Path(file).stat().st_mtime <= installed_s + _LAST_WRITES_S
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return file.startswith(tuple(f"{folder}{os.sep}" for folder in library)) and "-packages" not in file


@cache
def _files_of_wheels() -> dict[str, float]:
    """Return when the wheel of each installed file was installed, by the file's path."""
    folders = [Path(item) for item in sys.path if item.endswith(("site-packages", "dist-packages"))]
    times = {}
    for record in (record for folder in folders for record in folder.glob("*.dist-info/RECORD")):
        with suppress(OSError, UnicodeDecodeError):
            installed_s = record.stat().st_mtime
            names = (line.partition(",")[0] for line in record.read_text(encoding="utf-8").splitlines())
            times.update({f"{record.parents[1]}{os.sep}{name}": installed_s for name in names})
    return times
