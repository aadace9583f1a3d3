"""A trace on disk: a Chrome trace, plain or gzipped, a database of Nsight Systems, or Perfetto's format.

The text of a Chrome trace is read and decoded a piece at a time, so that the memory does not grow with it.
"""

import gzip
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from harness.errors import Code, HarnessError
from harness.profiling.trace.columns import Event, Trace, build_trace
from harness.profiling.trace.nsight import is_nsight, read_nsight
from harness.profiling.trace.perfetto import ENDINGS, is_perfetto, read_perfetto

_PIECE_BYTES = 1 << 20
"""Of the text that are decoded at once: larger pieces take more memory, and no less time."""
_MOST_EXPANSION = 100
"""Largest content of a gzipped trace, in sizes of the file; traces of torch are 10 to 30 times as large."""
GZIP_MAGIC = b"\x1f\x8b"
TRACE_ENDINGS = (".json", ".json.gz", ".sqlite", *ENDINGS)
"""Of the traces in a folder."""


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _Device(msgspec.Struct):
    name: str = ""


class _Document(msgspec.Struct):
    traceEvents: list[Event]  # noqa: N815  the format's own name
    distributedInfo: _Distributed | None = None  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815


def trace_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files, and of each folder all traces in it and below, by name.

    Raises:
        HarnessError: TRACE_UNREADABLE: a folder without a trace.
    """
    return [file for path in paths for file in _traces_of(path)]


def _traces_of(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    files = sorted(file for file in path.rglob("*") if file.name.endswith(TRACE_ENDINGS) and file.is_file())
    traces = [file for file in files if "trace" in file.name] or files
    if not traces:
        raise HarnessError(
            Code.TRACE_UNREADABLE,
            "the folder holds no trace",
            where=path,
            expected="files *.json, *.json.gz or *.sqlite",
        )
    yield from traces


def read_trace(path: Path) -> Trace:
    """Read a trace, whatever it is called.

    Raises:
        HarnessError: TRACE_UNREADABLE, TRACE_DAMAGED (cut off), TRACE_NOT_GZIP, TRACE_NOT_JSON or NO_TRACE_EVENTS.
    """
    if is_nsight(path):
        return read_nsight(path)
    if is_perfetto(path):
        return read_perfetto(path)
    with _opened(path) as read:
        events = _Events(read)
        try:
            trace = build_trace(events.batches())
        except msgspec.ValidationError as error:
            what = f"the file is no trace of torch: {events.with_number(str(error))}"
            raise HarnessError(Code.NO_TRACE_EVENTS, what, where=path, expected=_EXPECTED, hint=_EXPORT_HINT) from error
        except msgspec.DecodeError as error:
            raise _json_error(events.with_place(str(error)), path) from error
        except (RecursionError, UnicodeDecodeError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"a name is no UTF-8: {error}"
            what = f"the trace is no JSON of a profiler: {reason}"
            raise HarnessError(Code.TRACE_NOT_JSON, what, where=path, hint=_EXPORT_HINT) from None
        except (OverflowError, ValueError) as error:
            what = f"the trace has a number that no trace of torch has: {error}"
            raise HarnessError(Code.TRACE_NOT_JSON, what, where=path, hint=_EXPORT_HINT) from error
    if events.is_list and not len(trace.label):
        what = "the file is no trace of torch: a list without events"
        raise HarnessError(Code.NO_TRACE_EVENTS, what, where=path, expected=_EXPECTED, hint=_EXPORT_HINT)
    return replace(trace, num_events=events.num_events, rank=events.rank, device_names=events.device_names)


_EXPECTED = '{"traceEvents": [...]}'
_EXPORT_HINT = "a file of torch.profiler's export_chrome_trace"


def _json_error(what: str, path: Path) -> HarnessError:
    if "truncated" in what:
        what = "the trace is cut off: the JSON ends in the middle" if path.stat().st_size else "the trace is empty"
        return HarnessError(Code.TRACE_DAMAGED, what, where=path, hint="export it again, and let the program end")
    return HarnessError(Code.TRACE_NOT_JSON, f"the trace is no JSON: {what}", where=path, hint=_EXPORT_HINT)


_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST = re.compile(rb"\s*\[")
"""The bare list is what `profiler.events().export_chrome_trace` writes."""


@dataclass(slots=True)
class _Events:
    """The events of a Chrome trace, decoded a piece of the text at a time: a trace may be larger than the memory.

    A piece ends between two events. Whether a place lies between two, only decoding what is before it can tell.
    """

    read: Callable[[int], bytes]
    """Returns so many bytes of the text, fewer at its end; all of it for -1."""
    num_events: int = 0
    """That have been decoded."""
    rank: int | None = None
    device_names: tuple[str, ...] = ()
    is_list: bool = False
    _place: int = 0
    """In the text, of the first byte that has not been decoded."""
    _opening: bytes = b""
    """What makes JSON of the events that are left."""

    def batches(self) -> Iterator[list[Event]]:
        """Yield the events in order.

        Raises:
            msgspec.DecodeError: it is no JSON, or no trace.
        """
        text = bytearray(self.read(_PIECE_BYTES))
        text = self._without_head(text) if len(text) == _PIECE_BYTES else text
        while self._opening and (more := self.read(_PIECE_BYTES)):
            text += more
            events, end = _whole_events(text)
            if not events:
                break
            self.num_events += len(events)
            self._place += end
            text = text[end:]
            yield events
        text += self.read(-1)
        self.is_list = _LIST.match(self._opening or text) is not None
        text[:0] = self._opening
        if self.is_list:
            last = msgspec.json.decode(text, type=list[Event])
        else:
            document = msgspec.json.decode(text, type=_Document)
            self._keep(document)
            last = document.traceEvents
        self.num_events += len(last)
        yield last

    def _without_head(self, text: bytearray) -> bytearray:
        """Return the text from the first event on, or all of it where its begin is not that of a trace."""
        array = _LIST.match(text) or _ARRAY.search(text)
        if array is None:
            return text
        try:
            if array.re is _ARRAY:
                self._keep(msgspec.json.decode(text[: array.end()] + b"]}", type=_Document))
        except msgspec.DecodeError:
            return text
        self._opening, self._place = b"[" if array.re is _LIST else b'{"traceEvents":[', array.end()
        return text[array.end() :]

    def _keep(self, document: _Document) -> None:
        """Keep what a part of the document says of the whole."""
        self.rank = document.distributedInfo.rank if document.distributedInfo else self.rank
        self.device_names = tuple(device.name for device in document.deviceProperties) or self.device_names

    def with_number(self, message: str) -> str:
        """Return an error of `msgspec` with the number of the event in the trace, not in the piece."""
        return re.sub(r"\$(?:\.traceEvents)?\[(\d+)\]", lambda at: f"event {self.num_events + int(at[1])}", message)

    def with_place(self, message: str) -> str:
        """Return an error of `msgspec` with the byte in the text, not in the piece."""
        before = self._place - len(self._opening)
        return re.sub(r"\(byte (\d+)\)", lambda at: f"(byte {before + int(at[1])})", message)


_MOST_ENDS = 8
"""Ends of objects that are tried as the end of an event."""


def _whole_events(text: bytearray) -> tuple[list[Event], int]:
    """Return the events that end within a text, and where the next one begins; none where it is not to be found."""
    end = len(text)
    for _ in range(_MOST_ENDS):
        end = text.rfind(b"},", 0, end)
        if end < 0:
            break
        if text[end + 2 : end + 64].lstrip()[:1] == b"{":
            try:
                return msgspec.json.decode(b"[" + text[: end + 1] + b"]", type=list[Event]), end + 2
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:  # an object within an event ends there, or it is no JSON at all
                continue
    return [], 0


@contextmanager
def _opened(path: Path) -> Iterator[Callable[[int], bytes]]:
    """Yield what reads the text, plain or decompressed; errors of the file become ours."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise HarnessError(Code.TRACE_UNREADABLE, "the trace is not a regular file", where=path)
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            if path.suffix == ".gz" and not is_gzip and path.stat().st_size:
                what = "the file is gzipped in name only"
                raise HarnessError(Code.TRACE_NOT_GZIP, what, where=path, hint="rename it, or export it again")
            yield _Decompressed(file, path).read if is_gzip else file.read
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"the compressed trace is cut off or damaged: {error}"
        raise HarnessError(Code.TRACE_DAMAGED, what, where=path, hint="export or copy it again") from error
    except MemoryError as error:
        raise HarnessError(Code.TRACE_UNREADABLE, "the trace does not fit into memory", where=path) from error
    except OSError as error:
        what = f"the trace cannot be read: {error.strerror}"
        raise HarnessError(Code.TRACE_UNREADABLE, what, where=path) from error


class _Decompressed:
    """The text of a gzipped trace, which may not expand without end."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = gzip.GzipFile(fileobj=file), path
        self._num_left = _MOST_EXPANSION * max(path.stat().st_size, _PIECE_BYTES)

    def read(self, num_bytes: int) -> bytes:
        """Return so many bytes, fewer at the end; all that are left for -1.

        Raises:
            HarnessError: TRACE_DAMAGED: it expands to more than any trace does.
        """
        if num_bytes < 0:
            return b"".join(iter(partial(self.read, _PIECE_BYTES), b""))
        text = self._file.read(num_bytes)
        self._num_left -= len(text)
        if self._num_left < 0:
            what = "the compressed trace expands to more than any trace does"
            expected = f"at most {_MOST_EXPANSION} times its size"
            raise HarnessError(Code.TRACE_DAMAGED, what, where=self._path, expected=expected, hint="export it again")
        return text
