"""Spans of layers and operations in a trace, under the names of the taps.

An engine says where an operation *ends*, and a span must be named when it begins: the names come from an earlier run of
the same steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._profiler import _RecordFunctionFast

from harness.errors import Code, HarnessError
from harness.profiling.passes.load import PlannedStep
from harness.profiling.span_names import STEP, layer_of
from harness.results.profile import StepShape


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
        self._functions: dict[str, _RecordFunctionFast] = {}
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

    def _function(self, name: str) -> _RecordFunctionFast:
        if name not in self._functions:
            self._functions[name] = _RecordFunctionFast(name)
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
