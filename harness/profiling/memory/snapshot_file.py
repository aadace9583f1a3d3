"""Memory snapshots of any program: `torch.cuda.memory._dump_snapshot`, read without running what is in them.

Source: the schema of `torch.cuda.memory._snapshot` (torch 2.13), as far as it is read here.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.base.files import read_bytes
from harness.errors import Code, HarnessError
from harness.results.profile import Frame

IN_USE = "active_allocated"
"""State of a block that a tensor has."""
ALLOC, FREE = "alloc", "free_completed"
"""Events that change what is in use."""
_MOST_BYTES = 4 << 30
_MOST_FRAMES = 64
"""Innermost frames of a stack that are kept."""


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment."""

    address: int
    num_bytes: int
    requested_bytes: int
    state: str
    frames: tuple[Frame, ...]
    category: str | None
    is_private: bool = False
    """Whether it is in a pool of its own, as of a CUDA graph: no allocation outside of the graph can have it."""


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """One event of the allocator."""

    action: str
    address: int
    """-1 for events without an address."""
    num_bytes: int
    time_us: float
    frames: tuple[Frame, ...]
    category: str | None
    device_free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One device of a snapshot."""

    device: int
    segment_bytes: tuple[int, ...]
    blocks: tuple[Block, ...]
    events: tuple[AllocatorEvent, ...]
    settings: str = ""
    """Of the allocator, as `PYTORCH_CUDA_ALLOC_CONF` has them: those that are not the default."""


def read_snapshot(path: Path) -> list[DeviceSnapshot]:
    """Read a snapshot.

    Raises:
        HarnessError: SNAPSHOT_UNREADABLE: there is no such file, or it is no snapshot, or wants to run code.
    """
    try:
        snapshot = _PlainUnpickler(io.BytesIO(read_bytes(path, most_bytes=_MOST_BYTES))).load()
    except HarnessError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    try:
        return devices_of(snapshot)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise _unreadable(path, f"it has not the parts of a snapshot: {type(error).__name__}: {error}") from error


def devices_of(snapshot: Any) -> list[DeviceSnapshot]:
    """Return the devices of a `torch.cuda.memory._snapshot`; a missing part raises Python's own error."""
    return list(_Reader().devices(snapshot))


def _unreadable(path: Path, why: str) -> HarnessError:
    return HarnessError(
        Code.SNAPSHOT_UNREADABLE,
        "the file is no memory snapshot that can be read",
        where=path,
        expected="what torch.cuda.memory._dump_snapshot or `harness profile` writes",
        actual=why,
    )


class _PlainUnpickler(pickle.Unpickler):
    """Read containers, numbers and strings, and nothing that runs code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, and a snapshot holds plain data only")


class _Reader:
    """Check the types of all fields. Many events share a stack, and many stacks a frame: each is read once."""

    def __init__(self) -> None:
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        self._known: dict[int, Frame] = {}

    def devices(self, snapshot: Any) -> Iterator[DeviceSnapshot]:
        segments, traces = _typed(snapshot, "segments", list), _typed(snapshot, "device_traces", list)
        stated = _typed(snapshot, "allocator_settings", dict, {})
        changed = {name: stated.get(name, default) for name, default in _DEFAULTS.items()}
        settings = ",".join(f"{name}:{value}" for name, value in changed.items() if value != _DEFAULTS[name])
        numbers = {_typed(segment, "device", int) for segment in segments}
        for device in sorted(numbers | {at for at, trace in enumerate(traces) if trace}):
            device_segments = [segment for segment in segments if segment["device"] == device]
            blocks = [block for segment in device_segments for block in self._blocks(segment)]
            events = [self._event(event) for event in (traces[device] if device < len(traces) else ())]
            yield DeviceSnapshot(
                device=device,
                segment_bytes=tuple(_typed(segment, "total_size", int) for segment in device_segments),
                blocks=tuple(blocks),
                events=tuple(_with_sizes_of_blocks(events, blocks)),
                settings=settings,
            )

    def _blocks(self, segment: Mapping[str, Any]) -> Iterator[Block]:
        address = _typed(segment, "address", int)
        is_private = any(_typed(segment, "segment_pool_id", tuple, ()))
        for block in _typed(segment, "blocks", list):
            size = _typed(block, "size", int)
            yield Block(
                address=_typed(block, "address", int, address),  # older versions of torch leave it out
                num_bytes=size,
                requested_bytes=_typed(block, "requested_size", int, size),
                state=_typed(block, "state", str),
                frames=self._frames(block.get("frames")),
                category=_typed(block, "category", str, "") or None,
                is_private=is_private,
            )
            address += size

    def _event(self, event: Any) -> AllocatorEvent:
        return AllocatorEvent(
            action=_typed(event, "action", str),
            address=_typed(event, "addr", int, -1),
            num_bytes=_typed(event, "size", int, 0),
            time_us=float(_typed(event, "time_us", int, 0)),
            frames=self._frames(event.get("frames")),
            category=_typed(event, "category", str, "") or None,
            device_free_bytes=_typed(event, "device_free", int) if "device_free" in event else None,
        )

    def _frames(self, frames: Sequence[Any] | None) -> tuple[Frame, ...]:
        if frames is None:
            return ()
        if id(frames) not in self._stacks:
            self._stacks[id(frames)] = tuple(map(self._frame, frames[:_MOST_FRAMES]))
        return self._stacks[id(frames)]

    def _frame(self, frame: Any) -> Frame:
        if id(frame) not in self._known:
            self._known[id(frame)] = Frame(
                filename=_typed(frame, "filename", str),
                line=_typed(frame, "line", int),
                name=_typed(frame, "name", str),
            )
        return self._known[id(frame)]


def _with_sizes_of_blocks(events: Sequence[AllocatorEvent], blocks: Sequence[Block]) -> list[AllocatorEvent]:
    """Return the events with the sizes of the blocks that are still in use.

    torch notes the requested size of an allocation, and its block is larger: the history would end with less memory
    than the segments hold. Of a block that was freed only the requested size is known.
    """
    sized = list(events)
    last = {event.address: at for at, event in enumerate(events) if event.action in (ALLOC, FREE)}
    for block in blocks:
        at = last.get(block.address)
        if at is None or block.state != IN_USE or events[at].action != ALLOC:
            continue
        if events[at].num_bytes == block.requested_bytes:
            sized[at] = replace(events[at], num_bytes=block.num_bytes)
    return sized


_DEFAULTS = {"expandable_segments": False, "max_split_size": -1, "garbage_collection_threshold": 0.0}


def _typed(record: Any, name: str, kind: type, default: Any = None) -> Any:
    """Return a field of that type; the default if the field is missing and there is a default."""
    if not isinstance(record, dict):
        raise TypeError(f"{type(record).__name__} in the place of a dict")
    value = record[name] if default is None else record.get(name, default)
    if type(value) is not kind:
        raise TypeError(f"{name!r} is {type(value).__name__}, and not {kind.__name__}")
    return value
