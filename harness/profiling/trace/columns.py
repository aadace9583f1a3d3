"""The columns of a trace: one number an event and field, of any program and file format.

A trace of 200 MB holds some 600,000 events. As dicts they take gigabytes; here they come a batch at a time, and go into
columns of a few bytes each.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

NO_CORRELATION = -1


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
    process_names: tuple[str, ...]
    """By number; of a GPU its index, or `GPU 0`."""
    correlation: NDArray[np.int64]
    """The id that a kernel shares with the call that launched it; -1 for everything else."""
    begin_us: float
    """Of the first event, on the file's own clock."""
    inputs: tuple[tuple[str, str, str], ...]
    """Shapes, dtypes and strides of operators' inputs, as the file has them; each once, that of empty texts first."""
    input: NDArray[np.int32]
    """Index into `inputs`."""
    memory: MemoryColumns
    left_out: tuple[str, ...] = ()
    """In words, what the file has and the columns do not, or only in part."""
    rank: int | None = None
    """Of the process in a distributed run, where the file says it."""
    device_names: tuple[str, ...] = ()
    """Of the GPUs, as their driver calls them."""

    @property
    def end_ns(self) -> NDArray[np.int64]:
        """Since the first event."""
        return self.start_ns + self.duration_ns

    @property
    def extent_ns(self) -> tuple[int, int]:
        """Begin of the first event and end of the last; the profiler's own span around all of them is left out."""
        is_timed = self.are(lambda category, _: category != "Trace")
        start, end = self.start_ns[is_timed], self.end_ns[is_timed]
        return (int(start.min()), int(end.max())) if len(start) else (0, 0)

    def are(self, holds: Callable[[str, str], object]) -> NDArray[np.bool_]:
        """Return for each event whether this holds of its category and name."""
        return np.array([bool(holds(*label)) for label in self.labels], bool)[self.label]

    def name_of(self, event: int) -> str:
        """Return the name of one event."""
        return str(self.labels[self.label[event]][1])

    def process_name_of(self, event: int) -> str:
        """Return the name of the process that an event is under."""
        return self.process_names[int(self.processes[self.thread[event]])]


_LONGEST_US = 3e15
"""From 1970 to 2065: what is beyond it is no time, and three times as many nanoseconds still fit into 64 bits."""
_Id = Annotated[int, msgspec.Meta(ge=NO_CORRELATION, le=2**63 - 1)]
_Time = Annotated[float, msgspec.Meta(ge=-_LONGEST_US, le=_LONGEST_US)]


_NOTHING = msgspec.Raw(b"")


class Arguments(msgspec.Struct, gc=False, frozen=True):
    """What columns are made of, of the arguments of an event."""

    correlation: _Id = NO_CORRELATION
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_NOTHING)
    dtypes: msgspec.Raw = msgspec.field(name="Input type", default=_NOTHING)
    strides: msgspec.Raw = msgspec.field(name="Input Strides", default=_NOTHING)
    address: int | str = msgspec.field(name="Addr", default=0)
    num_bytes: int = msgspec.field(name="Bytes", default=0)
    device: _Id = msgspec.field(name="Device Id", default=-1)


_NO_ARGUMENTS = Arguments()


class Event(msgspec.Struct, gc=False):
    """One event, as a Chrome trace has it; times in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: _Time = 0.0
    dur: _Time = 0.0
    args: Arguments = _NO_ARGUMENTS


_Key = TypeVar("_Key")
_Label = tuple[str, str]
_Thread = tuple[int | str, int | str]
_Input = tuple[bytes, bytes, bytes]


_HALVES = ("B", "E", "b", "e")
"""Kinds of events that have a begin or an end; torch writes none."""


class _Numbers(dict[_Key, int]):
    """Gives each new key the next number."""

    def __missing__(self, key: _Key) -> int:
        self[key] = number = len(self)
        return number


def build_trace(
    batches: Iterable[Sequence[Event]],
    *,
    num_events: int = 0,
    device_names: Sequence[str] = (),
    left_out: Mapping[str, int] = MappingProxyType({}),
) -> Trace:
    """Build the columns of all complete events; the others are of memory, or left out.

    Args:
        batches: of events, in the order of the file.
        num_events: of every kind; 0 where only the end of the batches tells.
        device_names: of the GPUs.
        left_out: what the reader of the file has left out, and how many.

    Raises:
        ValueError: a number that no trace has.
    """
    labels, threads, processes = _Numbers[_Label](), _Numbers[_Thread](), _Numbers[int | str]()
    inputs = _Numbers[_Input]()
    inputs[b"", b"", b""]
    memory: list[Event] = []
    columns, num_halves = [_columns((), labels, threads, inputs)], 0
    for batch in batches:
        others = [event for event in batch if event.ph != "X"]
        memory += [event for event in others if event.name == "[memory]" and event.ph == "i"]
        num_halves += sum(event.ph in _HALVES for event in others)
        columns.append(_columns([event for event in batch if event.ph == "X"], labels, threads, inputs))
    start_us, duration_us, label, thread, correlation, of_inputs = map(np.concatenate, zip(*columns, strict=True))
    if max(np.abs(start_us).max(initial=0), np.abs(duration_us).max(initial=0)) > _LONGEST_US:
        raise ValueError("a time is not between 1970 and 2065")
    begin_us = start_us.min(initial=np.inf)
    left_out = {"events that are a begin or an end alone": num_halves, **left_out}
    left_out["events that end before they begin, and count as none"] = int((duration_us < 0).sum())
    allocations = _memory(memory, begin_us, threads)
    return Trace(
        num_events=num_events,
        labels=tuple(labels),
        label=label,
        # Whole nanoseconds: in sums of floats a neighbour would seem to begin before the one ahead of it ends.
        start_ns=np.rint((start_us - begin_us) * 1000).astype(np.int64),
        duration_ns=np.rint(np.maximum(duration_us, 0) * 1000).astype(np.int64),
        thread=thread,
        processes=np.array([processes[process] for process, _ in threads], np.int32),
        process_names=tuple(map(str, processes)),
        correlation=correlation,
        begin_us=float(begin_us),
        inputs=tuple(tuple(text.decode(errors="replace") for text in texts) for texts in inputs),  # type: ignore[misc]
        input=of_inputs,
        memory=allocations,
        left_out=tuple(f"{number:,} {what}" for what, number in left_out.items() if number),
        device_names=tuple(device_names),
    )


def _memory(events: Sequence[Event], begin_us: float, threads: _Numbers[_Thread]) -> MemoryColumns:
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


def _columns(
    events: Sequence[Event], labels: _Numbers[_Label], threads: _Numbers[_Thread], inputs: _Numbers[_Input]
) -> tuple[NDArray[np.generic], ...]:
    """Return start, duration, label, thread, correlation and inputs, gathered without a line of Python per event."""
    num = len(events)
    texts = (map(bytes, map(attrgetter(f"args.{name}"), events)) for name in ("shapes", "dtypes", "strides"))
    return (
        np.fromiter(map(attrgetter("ts"), events), np.float64, num),
        np.fromiter(map(attrgetter("dur"), events), np.float64, num),
        np.fromiter(map(labels.__getitem__, map(attrgetter("cat", "name"), events)), np.int32, num),
        np.fromiter(map(threads.__getitem__, map(attrgetter("pid", "tid"), events)), np.int32, num),
        np.fromiter(map(attrgetter("args.correlation"), events), np.int64, num),
        np.fromiter(map(inputs.__getitem__, zip(*texts, strict=True)), np.int32, num),
    )
