"""The memory pass: every allocation and free of the captured steps, with the stack that made it.

On the CPU they are the profiler's allocation events; on CUDA the allocator's history. Both become snapshots in the
schema of torch's CUDA allocator, which the public memory viewer reads: what is alive at the end of the captured steps
(`segments`) and what happened during them (`device_traces`). The file is a pickle of protocol 4 with plain types only:
the viewer reads no later one.
"""

import gc
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from harness.base.files import scratch_folder
from harness.engines.stepping import Session
from harness.profiling.load import Window, run_steps
from harness.profiling.memory.snapshot_file import devices_of
from harness.profiling.memory.timeline import (
    EARLIER_US,
    Allocation,
    PersistentBlock,
    build_timeline,
    categorize,
    match,
    read_history,
    stack,
)
from harness.profiling.operator_cost import storages
from harness.profiling.timing import Stopwatch
from harness.profiling.trace.tables import read_events
from harness.profiling.tracing import SpanEmitter, activities, profiling, recording_cuda_memory, step_span
from harness.results.profile import Frame, MemoryCategory, MemoryTimeline, StepShape

PICKLE_PROTOCOL = 4


def build_snapshot(
    allocations: Sequence[Allocation], held: Sequence[PersistentBlock], *, begin: float, end: float
) -> dict[str, Any]:
    """Build the snapshot of the time from `begin` to `end`, microseconds on the allocations' own clock."""
    builder = _Builder()
    blocks = [
        builder.block(block.address, block.num_bytes, block.category, (Frame(filename="", line=0, name=block.name),))
        for block in held
    ]
    blocks += [
        builder.block(allocation.address, allocation.num_bytes, allocation.category, allocation.frames)
        for allocation in allocations
        if allocation.is_alive(end)
    ]
    events = sorted(builder.events(allocations, begin, end), key=lambda event: event[0])
    return {
        "segments": [_segment(block) for block in sorted(blocks, key=lambda block: int(block["address"]))],
        "device_traces": [[event for _, event in events]],
    }


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot."""
    path.write_bytes(pickle.dumps(snapshot, protocol=PICKLE_PROTOCOL))


class _Builder:
    """Make plain data; equal stacks are one object, which a pickle holds once."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[Frame, ...], list[dict[str, Any]]] = {}

    def events(
        self, allocations: Iterable[Allocation], begin: float, end: float
    ) -> Iterator[tuple[tuple[float, int], dict[str, Any]]]:
        """Yield events with their sort keys."""
        for allocation in allocations:
            at, freed_at = allocation.time_us, allocation.freed_us
            if begin <= at <= end:
                yield (at, 0), self._event("alloc", allocation, at, allocation.frames)
            if freed_at is not None and begin <= freed_at <= end:
                for order, action in enumerate(("free_requested", "free_completed"), 1):
                    yield (freed_at, order), self._event(action, allocation, freed_at, allocation.freed_frames)

    def block(
        self, address: int, num_bytes: int, category: MemoryCategory, frames: tuple[Frame, ...]
    ) -> dict[str, Any]:
        return {
            "address": address,
            "size": num_bytes,
            "requested_size": num_bytes,
            "state": "active_allocated",
            "frames": self._plain(frames),
            "category": category.value,
        }

    def _event(self, action: str, allocation: Allocation, time_us: float, frames: tuple[Frame, ...]) -> dict[str, Any]:
        return {
            "action": action,
            "addr": allocation.address,
            "size": allocation.num_bytes,
            "stream": 0,
            "time_us": int(time_us),
            "frames": self._plain(frames),
            "category": allocation.category.value,
        }

    def _plain(self, frames: tuple[Frame, ...]) -> list[dict[str, Any]]:
        if frames not in self._stacks:
            self._stacks[frames] = [
                {"filename": frame.filename, "line": frame.line, "name": frame.name} for frame in frames
            ]
        return self._stacks[frames]


def _segment(block: dict[str, Any]) -> dict[str, Any]:
    """Return a segment of one block: the CPU allocator requests each block from the system."""
    size = block["size"]
    return {
        "device": 0,
        "address": block["address"],
        "total_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "blocks": [block],
    }


_MAX_CUDA_ENTRIES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCapture:
    """The results of the memory pass."""

    timeline: MemoryTimeline
    elapsed_s: float
    """Of the captured steps."""


def capture_memory(session: Session, window: Window, path: Path, *, device: str) -> MemoryCapture:
    """Record the memory of a window's steps and write a snapshot of it to `path`.

    Raises:
        HarnessError: RECORDER_RUNNING, PROFILER_FAILED, STEPS_DIFFER. The engine and torch are as they were.
    """
    held = _held(session)
    if torch.device(device).type == "cuda":
        return _capture_cuda(session, window, path, device, held)
    run = _Run(session, window)
    with scratch_folder("harness-") as folder:
        trace = folder / "memory.json"
        run.record(trace)
        events = read_events(trace)
    steps = events.steps[-len(window.steps) :]
    begin, end = steps[0].start, steps[-1].start + steps[-1].duration
    names = {name for step in window.steps for name in step.names}
    allocations = match(events.memory, names=names, frames=stack)
    # What the requests hold is known at the end of each step, and the steps are in the trace.
    ends = [step.start + step.duration for step in events.steps]
    categorize(allocations, dict(zip(ends, run.kv_storages, strict=True)))
    timeline = build_timeline(allocations, held, begin=begin, end=end)
    write_snapshot(build_snapshot(allocations, held, begin=begin, end=end), path)
    return MemoryCapture(timeline=timeline, elapsed_s=sum(step.duration for step in steps) / 1e6)


class _Run:
    """One run of the load up to the last captured step, with the profiler on from the first step.

    From the first step, because the profiler reports the free of a block only if it saw the allocation.
    """

    def __init__(self, session: Session, window: Window) -> None:
        self._session, self._window = session, window
        self.kv_storages: list[set[int]] = []
        """After each step, the addresses of what K and V are in."""

    def record(self, path: Path) -> None:
        session, window, emitter = self._session, self._window, SpanEmitter()
        steps = (*window.before, *window.steps)
        profiler = profile(activities=activities("cpu"), profile_memory=True, with_stack=True)

        def take(index: int) -> Sequence[int]:
            with step_span(steps[index].shape.label), emitter.step(steps[index]):
                requests = session.step()
            self.kv_storages.append(set(storages(session.cache_tensors())))
            return requests

        gc.collect()
        with profiling(profiler), session.watching(emitter):
            profiler.start()
            run_steps(session, window.load, take, num_steps=window.num_steps)
            gc.collect()  # otherwise the requests' memory stays until a later collection
        profiler.export_chrome_trace(str(path))


def _held(session: Session) -> list[PersistentBlock]:
    """Return what was allocated before any request: the weights, and a cache that is there from the beginning."""
    held = [
        PersistentBlock(address=address, num_bytes=num_bytes, category=MemoryCategory.WEIGHTS, name=name)
        for name, tensor in session.weights().items()
        for address, num_bytes in storages([tensor]).items()
    ]
    held += [
        PersistentBlock(address=address, num_bytes=num_bytes, category=MemoryCategory.KV_CACHE, name="KV cache")
        for address, num_bytes in storages(session.cache_tensors()).items()
    ]
    return list({block.address: block for block in reversed(held)}.values())[::-1]


class _Unheard:
    """A watcher that notes nothing: it only keeps an engine from replaying graphs, which allocate nothing."""

    def begin_step(self, shape: StepShape) -> None:
        """See `Watcher`."""

    def reached(self, name: str) -> None:
        """See `Watcher`."""


def _capture_cuda(
    session: Session, window: Window, path: Path, device: str, held: list[PersistentBlock]
) -> MemoryCapture:
    """Record the allocator's own history of the captured steps; its snapshot is written as it is."""
    stopwatch, index = Stopwatch(window, device), torch.device(device).index or 0
    taken: list[dict[str, Any]] = []
    with ExitStack() as recording:

        def take(step: int) -> Sequence[int]:
            if step == len(window.before):
                recording.enter_context(recording_cuda_memory(_MAX_CUDA_ENTRIES))
            with stopwatch.step(step):
                requests = session.step()
            if step == window.num_steps - 1:
                taken.append(torch.cuda.memory._snapshot())
            return requests

        with session.watching(_Unheard()):
            run_steps(session, window.load, take, num_steps=window.num_steps)
        gc.collect()
        final = torch.cuda.memory._snapshot()
    write_snapshot(taken[0], path)
    (history,) = (item for item in devices_of(final) if item.device == index)
    begin = min((event.time_us for event in history.events), default=0.0)
    addresses = {block.address for block in held}
    allocations = [item for item in read_history(history) if item.time_us > EARLIER_US or item.address not in addresses]
    for allocation in allocations:  # spans are not known here: activations cannot be told from what is temporary
        allocation.category = MemoryCategory.ACTIVATIONS if allocation.time_us > EARLIER_US else MemoryCategory.OTHER
    timeline = build_timeline(allocations, held, begin=begin, end=float("inf"))
    return MemoryCapture(timeline=timeline, elapsed_s=stopwatch.elapsed_s)
