"""Exact counts of what an engine dispatches: operators, FLOPs, bytes, K and V written, Python calls. Nothing is timed.

Counts are the same from run to run and from machine to machine, so that a change of one by one is a finding.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from harness.base.memory import collecting_no_garbage
from harness.engines.stepping import OperatorCost, Session
from harness.profiling.load import Window, run_steps
from harness.profiling.operator_cost import (
    bind,
    bytes_moved,
    elementwise_flops,
    flops,
    is_written,
    storages,
    tensors,
    written_bytes,
)
from harness.profiling.timing import Stopwatch
from harness.profiling.trace.tables import UNATTRIBUTED, site_of
from harness.results.profile import OperatorCount, StepShape

_NUMBERS = ("count", "flops", "elementwise_flops", "bytes_moved", "bytes_allocated")


@dataclass(slots=True)
class _Count:
    """Count one operator, by field of `OperatorCount` and by the function that dispatched it."""

    numbers: Counter[str] = field(default_factory=Counter)
    places: Counter[str] = field(default_factory=Counter)

    def add(self, addend: "_Count") -> None:
        self.numbers.update(addend.numbers)
        self.places.update(addend.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCounts:
    """Counts of the captured steps of a phase."""

    counts: tuple[OperatorCount, ...]
    """The operations in the order in which they are computed, the operators of each by name."""
    kv_bytes: int
    """K and V stored since the load began, up to the last captured step."""
    num_python_calls: int
    elapsed_s: float
    """Of the captured steps, the counting of operators included."""

    @property
    def flops(self) -> int:
        """Of all operators."""
        return sum(count.flops for count in self.counts)

    @property
    def bytes_allocated(self) -> int:
        """By all operators."""
        return sum(count.bytes_allocated for count in self.counts)


@dataclass(slots=True)
class _Tally:
    """A watcher that charges dispatched operators to the operation that has just ended."""

    charged: dict[str, dict[str, _Count]] = field(default_factory=dict)
    pending: dict[str, _Count] = field(default_factory=lambda: defaultdict(_Count))
    kv_storages: set[int] = field(default_factory=set)
    kv_bytes_written: int = 0
    is_open: bool = False
    """Whether a captured step is running."""

    def begin_step(self, shape: StepShape) -> None:
        """See `Watcher`."""

    def reached(self, name: str) -> None:
        """See `Watcher`."""
        if self.is_open:
            operation = self.charged.setdefault(site_of(name), defaultdict(_Count))
            for operator, count in self.pending.items():
                operation[operator].add(count)
        self.pending.clear()

    def dispatched(
        self, operator: torch._ops.OpOverload, arguments: Mapping[str, Any], result: Any, held: set[int]
    ) -> None:
        """Count one operator; `held` are the addresses of its inputs."""
        name = operator._schema.name
        for argument in operator._schema.arguments:
            if is_written(argument) and self.kv_storages & set(storages(tensors(arguments.get(argument.name)))):
                self.kv_bytes_written += written_bytes(name, arguments, argument.name)
        made = storages(tensors(result))
        self.pending[name].add(
            _Count(
                Counter(
                    count=1,
                    flops=flops(name, arguments),
                    elementwise_flops=elementwise_flops(operator, name, arguments, result),
                    bytes_moved=bytes_moved(operator, name, arguments, result),
                    bytes_allocated=sum(size for at, size in made.items() if at and at not in held),
                ),
                Counter((_place(),)),
            )
        )

    def computed(self, operator: OperatorCost) -> None:
        """See `OperatorWatcher`."""
        self.kv_bytes_written += operator.kv_bytes
        figures = {name: getattr(operator, name) for name in ("flops", "elementwise_flops", "bytes_moved")}
        self.pending[operator.name].add(_Count(Counter(count=1, **figures)))


_NOT_ASKED = ("torch", "harness")
"""Packages whose functions only pass an operator on."""


def _place() -> str:
    """Return the innermost function of the engine, or of what it uses, that has dispatched an operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _NOT_ASKED:
            return f"{module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "?"


class _Counting(TorchDispatchMode):
    """Show every dispatched operator to a tally, and compute it."""

    def __init__(self, tally: _Tally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = tally

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = bind(func, args, kwargs or {})
        held = set(storages(tensors(arguments)))
        result = func(*args, **(kwargs or {}))
        self._tally.dispatched(func, arguments, result, held)
        return result


@contextmanager
def _counting(tally: _Tally) -> Iterator[None]:
    """Count within this block.

    torch cannot make a `CausalBias` while a mode listens to its dispatcher: it is made while our mode is off.
    """
    from torch.nn.attention.bias import CausalBias

    def new(kind: type[torch.Tensor], *args: Any, **_kwargs: Any) -> torch.Tensor:
        with _disable_current_modes():
            return torch.Tensor.__new__(kind, *args)

    before = CausalBias.__dict__.get("__new__")
    CausalBias.__new__ = staticmethod(new)  # type: ignore[assignment]
    try:
        with _Counting(tally):
            yield
    finally:
        if before is None:
            del CausalBias.__new__
        else:
            CausalBias.__new__ = before  # type: ignore[method-assign]


def count(session: Session, window: Window, *, device: str = "cpu") -> PhaseCounts:
    """Count the captured steps of a window, in one run for the operators and one for the Python calls."""
    tally, stopwatch = _Tally(), Stopwatch(window, device)
    held: list[int] = []

    def take(index: int) -> Sequence[int]:
        tally.kv_storages = set(storages(session.cache_tensors()))
        tally.is_open = index >= len(window.before)
        with stopwatch.step(index), _counting(tally):
            requests = session.step()
        if tally.pending:  # after the last boundary of the step
            tally.reached(UNATTRIBUTED)
        held.append(_bytes(session.cache_tensors()))
        return requests

    before = _bytes(session.cache_tensors())
    with session.watching(tally):
        run_steps(session, window.load, take, num_steps=window.num_steps)
    return PhaseCounts(
        counts=tuple(_rows(tally.charged)),
        kv_bytes=tally.kv_bytes_written + held[-1] - before,
        num_python_calls=_count_python_calls(session, window),
        elapsed_s=stopwatch.elapsed_s,
    )


def _bytes(held: Sequence[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in held)


def _rows(charged: Mapping[str, Mapping[str, _Count]]) -> Iterator[OperatorCount]:
    for operation, operators in charged.items():
        for operator, count in sorted(operators.items()):
            numbers = {name: count.numbers[name] for name in _NUMBERS}
            places = tuple(sorted(count.places.items()))
            yield OperatorCount(operation=operation, operator=operator, places=places, **numbers)


def _count_python_calls(session: Session, window: Window) -> int:
    calls: Counter[str] = Counter()

    def take(index: int) -> Sequence[int]:
        if index < len(window.before):
            return session.step()
        with _calls_counted(calls):
            return session.step()

    run_steps(session, window.load, take, num_steps=window.num_steps)
    return calls["call"]


@contextmanager
def _calls_counted(calls: Counter[str]) -> Iterator[None]:
    """Count the calls of Python functions in this thread; earlier listeners are restored afterwards.

    No garbage is collected meanwhile: finalizers of whatever was there before would be counted.
    """
    before = sys.getprofile()
    with collecting_no_garbage():
        sys.setprofile(lambda _frame, event, _argument: calls.update((event,)))
        try:
            yield
        finally:
            sys.setprofile(before)
