"""What is in a trace and what changed between two, as plain data: the reports know nothing else, and need no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePhase:
    """The steps of one phase."""

    name: str
    count: int
    """Steps."""
    total_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOperator:
    """One operator, or one kernel of the GPU, within one phase; every event of it is counted."""

    name: str
    phase: str | None
    """None outside of every phase."""
    device: str
    """`cpu` for operators, `gpu` for kernels, copies and fills."""
    count: int
    total_us: float
    """Of one that calls itself, both."""
    self_us: float
    """Without the operators that it calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOperation:
    """One named operation of an engine, over all layers, within one phase."""

    name: str
    """Of the tap, without the layer: `self_attn.q_proj`."""
    phase: str | None
    count: int
    num_operators: int
    """Operators that run in it, those in others included."""
    total_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One trace."""

    path: str
    num_events: int
    """Of every kind, metadata too."""
    duration_us: float
    """From the begin of the first event to the end of the last."""
    phases: tuple[TracePhase, ...]
    """In order of their first step."""
    operators: tuple[TraceOperator, ...]
    """The one with the longest time of its own first."""
    operations: tuple[TraceOperation, ...]
    """In order of their first appearance; empty for a trace without spans of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """One operator or kernel within one phase, before and after; counts are 0 where it does not occur."""

    phase: str | None
    name: str
    device: str
    count_before: int
    count_after: int
    self_us_before: float
    self_us_after: float

    @property
    def is_of_count(self) -> bool:
        """Whether it runs more or less often: such a change is exact, one of time may be noise."""
        return self.count_before != self.count_after


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationChange:
    """One named operation within one phase, before and after."""

    phase: str | None
    name: str
    count_before: int
    count_after: int
    num_operators_before: int
    num_operators_after: int
    total_us_before: float
    total_us_after: float

    @property
    def is_of_count(self) -> bool:
        """Whether it runs, or what it calls runs, more or less often."""
        before = self.count_before, self.num_operators_before
        return before != (self.count_after, self.num_operators_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff:
    """Two traces, one against the other."""

    before: TraceSummary
    after: TraceSummary
    changes: tuple[OperatorChange, ...]
    """Changes of count first, then those of time alone; the largest first in either part."""
    operations: tuple[OperationChange, ...]
    """Likewise, for the spans of an engine that names its operations."""

    @property
    def steps(self) -> tuple[tuple[str, int, int], ...]:
        """Phase, steps before and steps after: unequal ones change every count."""
        before, after = ({phase.name: phase.count for phase in side.phases} for side in (self.before, self.after))
        return tuple((name, before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys([*before, *after]))
