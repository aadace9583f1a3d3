"""A trace on disk: a Chrome trace, plain or gzipped, a database of Nsight Systems, or Perfetto's format.

The text of a Chrome trace is cut into events first, and decoded a batch at a time.
"""

import gzip
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from harness.errors import Code, HarnessError
from harness.profiling.trace.columns import Event, Trace, build_trace
from harness.profiling.trace.nsight import is_nsight, read_nsight
from harness.profiling.trace.perfetto import ENDINGS, is_perfetto, read_perfetto

_BATCH = 1 << 14
"""Events that are decoded at once: few enough to be small beside the text, enough to make a batch cheap."""
_CHUNK_BYTES = 1 << 20
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
    traceEvents: list[msgspec.Raw]  # noqa: N815  the format's own name
    distributedInfo: _Distributed | None = None  # noqa: N815
    deviceProperties: list[_Device] = []  # noqa: N815


_Content = _Document | list[msgspec.Raw]
"""The bare list is what `profiler.events().export_chrome_trace` writes."""


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
    text = _read_text(path)
    if not bytes(text[:_CHUNK_BYTES]).strip():
        raise HarnessError(Code.TRACE_DAMAGED, "the trace is empty", where=path, hint="export it again")
    try:
        content = msgspec.json.decode(text, type=_Content)
        document = _Document(content) if isinstance(content, list) else content
        distributed = document.distributedInfo
        trace = build_trace(
            _batches(document.traceEvents),
            num_events=len(document.traceEvents),
            rank=distributed.rank if distributed else None,
            device_names=[device.name for device in document.deviceProperties],
        )
    except msgspec.ValidationError as error:
        what = f"the file is no trace of torch: {error}"
        raise HarnessError(Code.NO_TRACE_EVENTS, what, where=path, expected=_EXPECTED, hint=_EXPORT_HINT) from error
    except msgspec.DecodeError as error:
        raise _json_error(error, path) from error
    except (RecursionError, UnicodeDecodeError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else f"a name is no UTF-8: {error}"
        what = f"the trace is no JSON of a profiler: {reason}"
        raise HarnessError(Code.TRACE_NOT_JSON, what, where=path, hint=_EXPORT_HINT) from None
    except (OverflowError, ValueError) as error:
        what = f"the trace has a number that no trace of torch has: {error}"
        raise HarnessError(Code.TRACE_NOT_JSON, what, where=path, hint=_EXPORT_HINT) from error
    if isinstance(content, list) and not len(trace.label):
        what = "the file is no trace of torch: a list without events"
        raise HarnessError(Code.NO_TRACE_EVENTS, what, where=path, expected=_EXPECTED, hint=_EXPORT_HINT)
    return trace


_EXPECTED = '{"traceEvents": [...]}'
_EXPORT_HINT = "a file of torch.profiler's export_chrome_trace"


def _json_error(error: msgspec.DecodeError, path: Path) -> HarnessError:
    if "truncated" in str(error):
        what = "the trace is cut off: the JSON ends in the middle"
        return HarnessError(Code.TRACE_DAMAGED, what, where=path, hint="export it again, and let the program end")
    return HarnessError(Code.TRACE_NOT_JSON, f"the trace is no JSON: {error}", where=path, hint=_EXPORT_HINT)


def _read_text(path: Path) -> memoryview | bytearray:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise HarnessError(Code.TRACE_UNREADABLE, "the trace is not a regular file", where=path)
        with path.open("rb") as file:
            is_gzip = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        if is_gzip:
            return _decompressed(path)
        if path.suffix == ".gz" and path.stat().st_size:
            what = "the file is gzipped in name only"
            raise HarnessError(Code.TRACE_NOT_GZIP, what, where=path, hint="rename it, or export it again")
        return _content(path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"the compressed trace is cut off or damaged: {error}"
        raise HarnessError(Code.TRACE_DAMAGED, what, where=path, hint="export or copy it again") from error
    except MemoryError as error:
        raise HarnessError(Code.TRACE_UNREADABLE, "the trace does not fit into memory", where=path) from error
    except OSError as error:
        what = f"the trace cannot be read: {error.strerror}"
        raise HarnessError(Code.TRACE_UNREADABLE, what, where=path) from error


def _content(path: Path) -> memoryview:
    """Return the content; numpy's memory is of large pages, in which reading takes a fifth of the time."""
    content = np.empty(path.stat().st_size, np.uint8)
    with path.open("rb", buffering=0) as file:
        num_bytes, view = 0, content.data
        while num_read := file.readinto(view[num_bytes:]):  # at most 2 GiB at once
            num_bytes += num_read
    return view[:num_bytes]


def _decompressed(path: Path) -> bytearray:
    """Return the content; it grows in place, where `gzip.decompress` would hold it twice.

    Raises:
        HarnessError: TRACE_DAMAGED: it expands to more than any trace does.
    """
    text, most_bytes = bytearray(), _MOST_EXPANSION * max(path.stat().st_size, _CHUNK_BYTES)
    with gzip.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            text += chunk
            if len(text) > most_bytes:
                what = "the compressed trace expands to more than any trace does"
                expected = f"at most {_MOST_EXPANSION} times its size"
                raise HarnessError(Code.TRACE_DAMAGED, what, where=path, expected=expected, hint="export it again")
    return text


def _batches(events: Sequence[msgspec.Raw]) -> Iterator[list[Event]]:
    decode = msgspec.json.Decoder(Event).decode
    for at in range(0, len(events), _BATCH):
        yield [decode(event) for event in events[at : at + _BATCH]]
