"""The trace pass: torch.profiler over the captured steps of one phase, with a span for each layer and operation.

An engine says where an operation *ends*, and a span must be named when it begins: the names come from an earlier run of
the same steps. torch writes a span of an engine's operation as an operator, and tools that add operators up,
TensorBoard for one, would count it and all within it twice: in the written trace spans become user annotations. Tracks
of counters show the running requests and their K and V, and arrows lead from each step to the next.

A process has one profiler and one history of the CUDA allocator: a recorder that is already in use is left alone.
"""

import gzip
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from harness.engines.stepping import Session
from harness.errors import Code, HarnessError
from harness.profiling.load import PlannedStep, Window, run_steps
from harness.profiling.trace.tables import SPAN, STEP, layer_of
from harness.results.profile import StepShape


class _NvtxSpan:
    """A span of the profiler, and the same as an NVTX range, which Nsight Systems shows."""

    def __init__(self, name: str) -> None:
        self._name, self._function = name, _RecordFunctionFast(name)

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)
        self._function.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._function.__exit__(*error)
        torch.cuda.nvtx.range_pop()


@contextmanager
def step_span(label: str) -> Iterator[None]:
    """Annotate a step in the trace, and by an NVTX range where there is CUDA."""
    with torch.cuda.nvtx.range(label) if torch.cuda.is_available() else nullcontext(), record_function(label):
        yield


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The calls between two operations; all looked up beforehand, to keep the gap short."""

    name: str
    """Of the operation that ends."""
    leave: tuple[Callable[..., None], ...]
    enter: tuple[Callable[[], object], ...]


class SpanEmitter:
    """A watcher that opens and closes a span for each operation, and one around those of a layer."""

    def __init__(self) -> None:
        self._functions: dict[str, _RecordFunctionFast | _NvtxSpan] = {}
        self._plans: dict[tuple[str, ...], list[_Boundary]] = {}
        self._step: PlannedStep | None = None
        self._plan: list[_Boundary] = []
        self._num_reached = 0

    @contextmanager
    def step(self, step: PlannedStep) -> Iterator[None]:
        """Emit the spans of one step; whatever is open at its end is closed."""
        whole = self._function(STEP)
        whole.__enter__()
        self._step, self._plan, self._num_reached = step, self._plan_of(step.names), 0
        for name in _open_after(step.names, 0):
            self._function(name).__enter__()
        try:
            yield
            if self._num_reached < len(step.names):
                raise self._differs("the end of the step")
        finally:
            for name in reversed(_open_after(step.names, self._num_reached)):
                self._functions[name].__exit__(None, None, None)
            whole.__exit__(None, None, None)
            self._step = None

    def begin_step(self, shape: StepShape) -> None:
        """See `Watcher`; also refuses a step that is not the one that was planned."""
        if self._step is not None and shape != self._step.shape:
            raise self._differs(shape.label, expected=self._step.shape.label)

    def reached(self, name: str) -> None:
        """See `Watcher`."""
        if self._step is None:
            return
        boundary = self._plan[self._num_reached] if self._num_reached < len(self._plan) else None
        if boundary is None or boundary.name != name:
            raise self._differs(name)
        self._num_reached += 1
        for leave in boundary.leave:
            leave(None, None, None)
        for enter in boundary.enter:
            enter()

    def _plan_of(self, names: tuple[str, ...]) -> list[_Boundary]:
        if names not in self._plans:
            self._plans[names] = [self._boundary(names, index) for index in range(len(names))]
        return self._plans[names]

    def _boundary(self, names: tuple[str, ...], index: int) -> _Boundary:
        before, after = _open_after(names, index), _open_after(names, index + 1)
        is_same_layer = len(before) == len(after) == 2 and before[0] == after[0]
        left, entered = (before[1:], after[1:]) if is_same_layer else (before, after)
        return _Boundary(
            name=names[index],
            leave=tuple(self._function(name).__exit__ for name in reversed(left)),
            enter=tuple(self._function(name).__enter__ for name in entered),
        )

    def _function(self, name: str) -> _RecordFunctionFast | _NvtxSpan:
        if name not in self._functions:
            self._functions[name] = (_NvtxSpan if torch.cuda.is_available() else _RecordFunctionFast)(name)
        return self._functions[name]

    def _differs(self, actual: str, *, expected: str | None = None) -> HarnessError:
        assert self._step is not None
        names, index = self._step.names, self._num_reached
        return HarnessError(
            Code.STEPS_DIFFER,
            "the engine does not repeat its steps",
            where=f"step {self._step.index} of the load",
            expected=expected or (names[index] if index < len(names) else "the end of the step"),
            actual=actual,
            hint="turn off what remembers earlier requests, a prefix cache for one",
        )


def _open_after(names: tuple[str, ...], num_reached: int) -> tuple[str, ...]:
    """Return the spans that are open when so many operations have ended, the outer one first."""
    if num_reached == len(names):
        return ()
    name = names[num_reached]
    layer = layer_of(name)
    return (name,) if layer is None else (layer, name)


_FLOW = "next step"


def annotate(path: Path, steps: Sequence[StepShape], *, kv_bytes_per_token: int) -> None:
    """Rewrite a gzipped trace of these steps.

    Steps are in order of time; `kv_bytes_per_token` are those of one token in all layers.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document = json.load(file)
    events = document["traceEvents"]
    for event in events:
        if event.get("cat") == "cpu_op" and SPAN.match(event["name"]):
            event["cat"] = "user_annotation"
    labels = {step.label for step in steps}
    shown = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in labels]
    shown.sort(key=lambda event: float(event["ts"]))
    for event, step in zip(shown, steps, strict=False):
        events += _counters(event, step, kv_bytes_per_token)
    events += _flows(shown)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=6) as file:
        json.dump(document, file, ensure_ascii=False)


def _counters(event: dict[str, Any], step: StepShape, kv_bytes_per_token: int) -> Iterator[dict[str, Any]]:
    """Yield what the counters are from the step on: it has room for its tokens when it begins."""
    values = {
        "running requests": {"requests": len(step.query_lens)},
        "K and V held": {"bytes": sum(step.context_lens) * kv_bytes_per_token},
    }
    for name, value in values.items():
        yield {"ph": "C", "name": name, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"], "args": value}


def _flows(shown: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each step to the next."""
    for number, (before, after) in enumerate(pairwise(shown)):
        common = {"cat": _FLOW, "name": _FLOW, "id": number}
        end = float(before["ts"]) + 0.999 * float(before["dur"])
        yield {"ph": "s", "pid": before["pid"], "tid": before["tid"], "ts": end, **common}
        yield {"ph": "f", "bp": "e", "pid": after["pid"], "tid": after["tid"], "ts": after["ts"], **common}


def activities(device: str) -> list[ProfilerActivity]:
    """Return what torch.profiler is to record on a device."""
    cuda = [ProfilerActivity.CUDA] if torch.device(device).type == "cuda" else []
    return [ProfilerActivity.CPU, *cuda]


def refuse_running_profiler() -> None:
    """Raise HarnessError (RECORDER_RUNNING) where another profiler is on."""
    if torch._C._autograd._profiler_enabled():
        raise _running("a profiler is running already")


@contextmanager
def profiling(profiler: profile) -> Iterator[None]:
    """Stop a profiler in any case that the block may have started; what goes wrong in it or in stopping it is raised.

    Raises:
        HarnessError: RECORDER_RUNNING; PROFILER_FAILED for what the profiler raises.
    """
    refuse_running_profiler()
    # Or the profiler announces each of its starts on standard error, at a level above its errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        with _profiler_errors(), warnings.catch_warnings():
            # Each cycle is exported by itself. Torch 2.11 warns of that, even if there is one cycle.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            yield
            profiler.stop()
    except BaseException:
        if torch._C._autograd._profiler_enabled():
            with suppress(Exception):  # the first error says more
                profiler.stop()
        raise


@contextmanager
def _profiler_errors() -> Iterator[None]:
    try:
        yield
    except HarnessError:
        raise
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        raise HarnessError(
            Code.PROFILER_FAILED,
            f"profiling failed with {type(error).__name__}: {error}",
            hint="set HARNESS_TRACEBACK=1 to see where",
        ) from error


@contextmanager
def recording_cuda_memory(max_entries: int) -> Iterator[None]:
    """Record the history of the CUDA allocator, with Python stacks, and turn it off again.

    Raises:
        HarnessError: RECORDER_RUNNING: a history is recorded already, and is left alone.
    """
    if torch._C._cuda_isHistoryEnabled():
        raise _running("the history of the CUDA allocator is being recorded already")
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=max_entries)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _running(what: str) -> HarnessError:
    return HarnessError(
        Code.RECORDER_RUNNING, what, where="this process", hint="stop it first: only one can run in a process"
    )


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
            with step_span(steps[index].shape.label), self.emitter.step(steps[index]):
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
