"""The trace pass: torch.profiler over the captured steps of one phase, with a span for each layer and operation."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerAction, profile, record_function

from harness.engines.stepping import Session
from harness.profiling.passes.annotate import annotate
from harness.profiling.passes.load import Window, run_steps
from harness.profiling.passes.recorders import activities, profiling
from harness.profiling.passes.spans import SpanEmitter


def trace(
    session: Session, window: Window, folder: Path, *, worker: str, device: str, about: Mapping[str, Any]
) -> tuple[Path, ...]:
    """Write one Chrome trace for each cycle of the window's schedule, and return their paths.

    Traces go to the folder as `<worker>.<ns>.pt.trace.json.gz`, and viewers show the `worker`; `about` is written into
    their metadata.

    Raises:
        HarnessError: RECORDER_RUNNING, PROFILER_FAILED, STEPS_DIFFER. What was written before stays, and the engine
            and torch are as they were.
    """
    cycle = _Cycle(session, window, device)
    return tuple(cycle.run(folder, worker, about) for _ in range(window.schedule.repeat))


@dataclass(slots=True)
class _Cycle:
    """One profiler from its start to its file."""

    session: Session
    window: Window
    device: str
    emitter: SpanEmitter = field(default_factory=SpanEmitter)

    def run(self, folder: Path, worker: str, about: Mapping[str, Any]) -> Path:
        path = folder / f"{worker}.{time.time_ns()}.pt.trace.json.gz"
        profiler = profile(
            activities=activities(self.device),
            record_shapes=True,
            schedule=_actions(self.window),
            on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
        )
        profiler.preset_metadata_json("harness", _metadata(about))
        with profiling(profiler), self.session.watching(self.emitter):
            profiler.start()
            for units in self.window.runs:
                self._run(units, profiler)
        annotate(path, self.window.shapes, kv_bytes_per_token=self.session.model.kv_bytes_per_token)
        return path

    def _run(self, units: Sequence[range], profiler: profile) -> None:
        """Run the load once, each step within a unit in its spans."""
        steps = (*self.window.before, *self.window.steps)
        lasts = {unit[-1] for unit in units}
        captured = range(units[0][0], units[-1][-1] + 1)

        def take(index: int) -> Sequence[int]:
            if index not in captured:
                return self.session.step()
            with record_function(steps[index].shape.label), self.emitter.step(steps[index]):
                requests = self.session.step()
            if index in lasts:
                profiler.step()
            return requests

        run_steps(self.session, self.window.load, take, num_steps=self.window.num_steps)


def _metadata(about: Mapping[str, Any]) -> str:
    """Return JSON that survives the profiler, which drops the backslashes of what it is given."""
    return json.dumps(dict(about), ensure_ascii=False).replace("\\\\", "/").replace('\\"', "'").replace("\\", "/")


def _actions(window: Window) -> Callable[[int], ProfilerAction]:
    """Return the profiler's schedule: units that are left alone, units to warm up with, units that are recorded."""
    num_units = sum(map(len, window.runs))
    num_recorded = len(window.steps) if window.phase == "decode" else 1
    num_ahead = num_units - num_recorded
    num_warmup = min(window.schedule.warmup, num_ahead)

    def action(unit: int) -> ProfilerAction:
        if unit < num_ahead - num_warmup or unit >= num_units:
            return ProfilerAction.NONE
        if unit < num_ahead:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if unit == num_units - 1 else ProfilerAction.RECORD

    return action
