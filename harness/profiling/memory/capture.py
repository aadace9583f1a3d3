"""The memory pass: every allocation and free of the captured steps, with the stack that made it.

On the CPU they are the profiler's allocation events; on CUDA the allocator's own history (written, and not measured on
a GPU yet).
"""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from harness.base.scratch import scratch_folder
from harness.engines.stepping import Session
from harness.profiling.cost.storage import storages
from harness.profiling.memory.allocations import PersistentBlock, categorize, match, stack
from harness.profiling.memory.history import EARLIER_US, read_history
from harness.profiling.memory.snapshot import build_snapshot, write_snapshot
from harness.profiling.memory.snapshot_file import devices_of
from harness.profiling.memory.timeline import build_timeline
from harness.profiling.passes.load import Window, run_steps
from harness.profiling.passes.recorders import activities, profiling, recording_cuda_memory
from harness.profiling.passes.spans import SpanEmitter
from harness.profiling.passes.timing import Stopwatch
from harness.profiling.trace.nodes import read_events
from harness.results.profile import MemoryCategory, MemoryTimeline, StepShape

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

    From the first, because the profiler knows the frees of those blocks only whose allocation it has seen.
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
            with record_function(steps[index].shape.label), emitter.step(steps[index]):
                requests = session.step()
            self.kv_storages.append(set(storages(session.cache_tensors())))
            return requests

        gc.collect()
        with profiling(profiler), session.watching(emitter):
            profiler.start()
            run_steps(session, window.load, take, num_steps=window.num_steps)
            gc.collect()  # or what the requests held stays until some later collection
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
    (own,) = (item for item in devices_of(final) if item.device == index)
    begin = min((event.time_us for event in own.events), default=0.0)
    addresses = {block.address for block in held}
    allocations = [item for item in read_history(own) if item.time_us > EARLIER_US or item.address not in addresses]
    for allocation in allocations:  # spans are not known here: activations cannot be told from what is temporary
        allocation.category = MemoryCategory.ACTIVATIONS if allocation.time_us > EARLIER_US else MemoryCategory.OTHER
    timeline = build_timeline(allocations, held, begin=begin, end=float("inf"))
    return MemoryCapture(timeline=timeline, elapsed_s=stopwatch.elapsed_s)
