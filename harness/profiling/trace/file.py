"""A Chrome trace of torch on disk, of any program, read into columns: one number an event and field.

A trace of 200 MB holds some 600,000 events. As dicts they take gigabytes; here the text is cut into events first, and
decoded a batch at a time into columns of a few bytes each.
"""

import gzip
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.errors import Code, HarnessError

NO_CORRELATION = -1
_BATCH = 1 << 14
"""Events that are decoded at once: few enough to be small beside the text, enough to make a batch cheap."""
_CHUNK_BYTES = 1 << 20
_MOST_EXPANSION = 100
"""Largest content of a gzipped trace, in sizes of the file; traces of torch are 10 to 30 times as large."""
GZIP_MAGIC = b"\x1f\x8b"
_ENDINGS = (".json", ".json.gz")
"""Of the traces in a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """The allocations and frees of a trace, in the order of the file."""

    time_ns: NDArray[np.int64]
    """Since the first event."""
    address: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    """Negative for a free."""
    thread: NDArray[np.int32]
    device: NDArray[np.int64]
    """Number of the GPU; -1 for the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The complete events (`"ph": "X"`) of a trace, in the order of the file."""

    num_events: int
    """Of every kind, metadata and instants too."""
    labels: tuple[tuple[str, str], ...]
    """Category and name, each pair once."""
    label: NDArray[np.int32]
    """Index into `labels`."""
    start_ns: NDArray[np.int64]
    """Since the first event."""
    duration_ns: NDArray[np.int64]
    thread: NDArray[np.int32]
    """Number of the thread; the stream of a GPU counts as one."""
    processes: NDArray[np.int32]
    """Of each thread the number of its process."""
    correlation: NDArray[np.int64]
    """The id that a kernel shares with the call that launched it; -1 for everything else."""
    begin_us: float
    """Of the first event, on the file's own clock."""
    inputs: tuple[tuple[str, str], ...]
    """Shapes and dtypes of operators' inputs, as the file has them; each pair once, that of empty texts first."""
    input: NDArray[np.int32]
    """Index into `inputs`."""
    memory: MemoryColumns
    rank: int | None = None
    """Of the process in a distributed run, where the file says it."""
    device_names: tuple[str, ...] = ()
    """Of the GPUs, as their driver calls them."""

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """Since the first event."""
        return self.start_ns + self.duration_ns

    def are(self, holds: Callable[[str, str], object]) -> NDArray[np.bool_]:
        """Return for each event whether this holds of its category and name."""
        return np.array([bool(holds(*label)) for label in self.labels], bool)[self.label]

    def name_of(self, event: int) -> str:
        """Return the name of one event."""
        return str(self.labels[self.label[event]][1])


_LONGEST_US = 3e15
"""From 1970 to 2065: what is beyond it is no time, and three times as many nanoseconds still fit into 64 bits."""
_Id = Annotated[int, msgspec.Meta(ge=NO_CORRELATION, le=2**63 - 1)]
_Time = Annotated[float, msgspec.Meta(ge=-_LONGEST_US, le=_LONGEST_US)]


_NOTHING = msgspec.Raw(b"")


class _Arguments(msgspec.Struct, gc=False, frozen=True):
    correlation: _Id = NO_CORRELATION
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_NOTHING)
    dtypes: msgspec.Raw = msgspec.field(name="Input type", default=_NOTHING)
    address: int | str = msgspec.field(name="Addr", default=0)
    num_bytes: int = msgspec.field(name="Bytes", default=0)
    device: _Id = msgspec.field(name="Device Id", default=-1)


_NO_ARGUMENTS = _Arguments()


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Time = 0.0
    dur: _Time = 0.0
    args: _Arguments = _NO_ARGUMENTS


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
_Key = TypeVar("_Key")
_Label = tuple[str, str]
_Thread = tuple[int | str, int | str]
_Input = tuple[bytes, bytes]


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
    files = sorted(file for file in path.rglob("*") if file.name.endswith(_ENDINGS) and file.is_file())
    traces = [file for file in files if "trace" in file.name] or files
    if not traces:
        raise HarnessError(
            Code.TRACE_UNREADABLE, "the folder holds no trace", where=path, expected="files *.json or *.json.gz"
        )
    yield from traces


class _Numbers(dict[_Key, int]):
    """Gives each new key the next number."""

    def __missing__(self, key: _Key) -> int:
        self[key] = number = len(self)
        return number


def read_trace(path: Path) -> Trace:
    """Read a trace, plain or gzipped, whatever it is called.

    Raises:
        HarnessError: TRACE_UNREADABLE, TRACE_DAMAGED (cut off), TRACE_NOT_GZIP, TRACE_NOT_JSON or NO_TRACE_EVENTS.
    """
    text = _read_text(path)
    if not bytes(text[:_CHUNK_BYTES]).strip():
        raise HarnessError(Code.TRACE_DAMAGED, "the trace is empty", where=path, hint="export it again")
    try:
        content = msgspec.json.decode(text, type=_Content)
        document = _Document(content) if isinstance(content, list) else content
        trace = _columns(document)
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


def _columns(document: _Document) -> Trace:
    events = document.traceEvents
    labels, threads, processes = _Numbers[_Label](), _Numbers[_Thread](), _Numbers[int | str]()
    inputs = _Numbers[_Input]()
    inputs[b"", b""]
    memory: list[_Event] = []
    batches = [_batch(batch, labels, threads, inputs) for batch in _batches(events, memory)]
    start_us, duration_us, label, thread, correlation, shapes_and_dtypes = (
        np.concatenate(columns) for columns in zip(*batches, strict=True)
    )
    begin_us = start_us.min(initial=np.inf)
    allocations = _memory(memory, begin_us, threads)
    return Trace(
        num_events=len(events),
        labels=tuple(labels),
        label=label,
        # Whole nanoseconds: in sums of floats a neighbour would seem to begin before the one ahead of it ends.
        start_ns=np.rint((start_us - begin_us) * 1000).astype(np.int64),
        duration_ns=np.rint(np.maximum(duration_us, 0) * 1000).astype(np.int64),
        thread=thread,
        processes=np.array([processes[process] for process, _ in threads], np.int32),
        correlation=correlation,
        begin_us=float(begin_us),
        inputs=tuple((shapes.decode(errors="replace"), dtypes.decode(errors="replace")) for shapes, dtypes in inputs),
        input=shapes_and_dtypes,
        memory=allocations,
        rank=document.distributedInfo.rank if document.distributedInfo else None,
        device_names=tuple(device.name for device in document.deviceProperties),
    )


def _batches(events: Sequence[msgspec.Raw], memory: list[_Event]) -> Iterator[list[_Event]]:
    """Yield the complete events, at least one batch of them, be it empty; keep those of memory."""
    decode = msgspec.json.Decoder(_Event).decode
    for at in range(0, max(1, len(events)), _BATCH):
        batch = [decode(event) for event in events[at : at + _BATCH]]
        memory += [event for event in batch if event.name == "[memory]" and event.ph == "i"]
        yield [event for event in batch if event.ph == "X"]


def _memory(events: Sequence[_Event], begin_us: float, threads: _Numbers[_Thread]) -> MemoryColumns:
    num = len(events)
    addresses = (_address(event.args.address) for event in events)
    return MemoryColumns(
        time_ns=np.rint((np.fromiter(map(attrgetter("ts"), events), np.float64, num) - begin_us) * 1000).astype(
            np.int64
        ),
        address=np.fromiter(addresses, np.int64, num),
        num_bytes=np.fromiter(map(attrgetter("args.num_bytes"), events), np.int64, num),
        device=np.fromiter(map(attrgetter("args.device"), events), np.int64, num),
        thread=np.fromiter(map(threads.__getitem__, map(attrgetter("pid", "tid"), events)), np.int32, num),
    )


def _address(value: int | str) -> int:
    """Return an address of 64 bits as int64; raises ValueError if it has more."""
    address = int(str(value), 0)
    if not -(2**63) <= address < 2**64:
        raise ValueError("an address has more than 64 bits")
    return address - 2**64 if address >= 2**63 else address


def _batch(
    events: Sequence[_Event], labels: _Numbers[_Label], threads: _Numbers[_Thread], inputs: _Numbers[_Input]
) -> tuple[NDArray[np.generic], ...]:
    """Return start, duration, label, thread, correlation and inputs, gathered without a line of Python per event."""
    num = len(events)
    shapes, dtypes = (map(bytes, map(attrgetter(name), events)) for name in ("args.shapes", "args.dtypes"))
    return (
        np.fromiter(map(attrgetter("ts"), events), np.float64, num),
        np.fromiter(map(attrgetter("dur"), events), np.float64, num),
        np.fromiter(map(labels.__getitem__, map(attrgetter("cat", "name"), events)), np.int32, num),
        np.fromiter(map(threads.__getitem__, map(attrgetter("pid", "tid"), events)), np.int32, num),
        np.fromiter(map(attrgetter("args.correlation"), events), np.int64, num),
        np.fromiter(map(inputs.__getitem__, zip(shapes, dtypes, strict=True)), np.int32, num),
    )
