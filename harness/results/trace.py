"""Contents of a trace, and changes between two, as plain data for the reports. Nothing here imports torch."""

from dataclasses import dataclass, field
from enum import StrEnum


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
class TraceModule:
    """All modules of one place in the model, by their classes: what is no module's own is its caller's."""

    path: str
    """`Qwen3Model/Qwen3DecoderLayer/Qwen3Attention/Linear`."""
    count: int
    """Calls."""
    total_us: float
    self_us: float
    """Without the modules that it calls."""
    num_operators: int
    """Operators that run in it and in no inner module."""
    device_us: float
    """Of the kernels that were launched in it and in no inner module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleKernel:
    """All launches of one kernel by the modules of one place in the model."""

    path: str
    """Of the innermost module that launched it, by classes."""
    name: str
    count: int
    total_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceProduct:
    """All matrix products of one operator and shape."""

    name: str
    shapes: str
    """Of its inputs, as the trace has them: `[[128, 256], [256, 512]]`."""
    count: int
    time_us: float
    """Of the kernels that it launched, or of the operator where the trace has no kernels."""
    flops: int
    has_device: bool

    @property
    def flops_per_s(self) -> float:
        """The rate that it reached."""
        return self.flops / self.time_us * 1e6 if self.time_us else 0.0


@dataclass(slots=True, kw_only=True)
class FlameFrame:
    """One frame of a flame graph: equal names under equal callers."""

    name: str
    count: int = 0
    total_us: float = 0.0
    children: "dict[str, FlameFrame]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleTime:
    """Why a stream of a GPU did nothing between its kernels."""

    stream: int
    """Number of the thread in the trace."""
    host_late_us: float
    """The next kernel was launched when the one before it had ended: the host is too slow."""
    queued_us: float
    """Two kernels were queued, and less than 30 ns apart."""
    other_us: float
    """The kernel was launched in time and began later: it waited for another stream, a copy or an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The calls that launched a device's kernels, copies and fills."""

    num_launches: int
    num_unknown: int
    """Kernels whose launch the trace does not show."""
    call_us: float
    """Spent in the calls."""
    delay_us_median: float
    """From the end of the call to the begin of the kernel."""
    delay_us_max: float
    num_shorter_than_launch: int
    """Kernels that took less time than the call that launched them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Collectives, and how much of them other kernels hide."""

    num_kernels: int
    total_us: float
    hidden_us: float
    """While some other kernel computed."""
    compute_us: float
    """While some kernel that is no collective and no copy ran."""

    @property
    def hidden_share(self) -> float:
        """Of the collectives' time."""
        return self.hidden_us / self.total_us if self.total_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """One GPU in a trace."""

    device: int
    """Number of the process that its events are under, in order of appearance."""
    span_us: float
    """From its first kernel to the end of its last."""
    busy_us: float
    """While at least one kernel, copy or fill ran."""
    idle: tuple[IdleTime, ...]
    """By stream."""
    launches: Launches
    communication: Communication | None
    """None without collectives."""


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
    modules: tuple[TraceModule, ...] = ()
    """In order of their first call; empty if the trace has no `nn.Module` events."""
    module_kernels: tuple[ModuleKernel, ...] = ()
    """Those that take longest first; empty if the trace has no `nn.Module` events, or no kernels."""
    products: tuple[TraceProduct, ...] = ()
    """Those that take longest first; empty if the trace has no shapes."""
    devices: tuple[DeviceActivity, ...] = ()
    rank: int | None = None
    """Of the process in a distributed run, where the trace says it."""


class LinkKind(StrEnum):
    """The kind of a link in a critical path."""

    KERNEL = "kernel"
    COPY = "copy"
    """Or a fill, on the device."""
    COMMUNICATION = "communication"
    LAUNCH = "launch"
    """From the begin of the launching call to the begin of the kernel."""
    QUEUE = "queue"
    """Between two kernels of a stream, the second of which was launched before the first had ended."""
    OTHER_STREAM = "other stream"
    """Between a kernel of another stream and the one that waited for it."""
    OPERATOR = "operator"
    """On the CPU, without the operators and calls in it."""
    RUNTIME = "runtime"
    """A call of the device's runtime."""
    HOST = "host"
    """A thread of the CPU in no operator and no call: Python, mostly."""
    UNKNOWN = "unknown"
    """The trace shows nothing that this time follows from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLink:
    """All links of a critical path that are of one kind and name."""

    kind: LinkKind
    name: str
    """Of the operator, call or kernel; of what comes before a kernel, the kernel's; empty if there is none."""
    count: int
    total_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of events that the duration of a trace, or of one of its steps, is made of."""

    path: str
    rank: int | None
    total_us: float
    """Of all links: the duration."""
    links: tuple[PathLink, ...]
    """The longest first."""

    def time_us(self, kind: LinkKind) -> float:
        """Return the time of all links of a kind."""
        return sum(link.total_us for link in self.links if link.kind is kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """One operator or kernel within one phase, before and after; counts are 0 if it does not occur."""

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
    modules: tuple[OperationChange, ...] = ()
    """Likewise, for the `nn.Module`s of both traces; of no phase."""

    @property
    def steps(self) -> tuple[tuple[str, int, int], ...]:
        """Phase, steps before and steps after: unequal ones change every count."""
        before, after = ({phase.name: phase.count for phase in side.phases} for side in (self.before, self.after))
        return tuple((name, before.get(name, 0), after.get(name, 0)) for name in dict.fromkeys([*before, *after]))
