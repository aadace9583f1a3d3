"""Traces that a user names: files, and folders with the files of several ranks."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.errors import Code, HarnessError

_ENDINGS = (".json", ".json.gz")


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files, and of each folder all traces in it and below, by name.

    Raises:
        HarnessError: TRACE_UNREADABLE: a folder without a trace.
    """
    return [file for path in paths for file in _files(path)]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found = sorted(file for file in path.rglob("*") if file.name.endswith(_ENDINGS) and file.is_file())
    traces = [file for file in found if "trace" in file.name] or found
    if not traces:
        raise HarnessError(
            Code.TRACE_UNREADABLE, "the folder holds no trace", where=path, expected="files *.json or *.json.gz"
        )
    yield from traces
