"""Contents of a trace, and changes between two, as plain data for the reports. Nothing here imports torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSize:
    """The steps of one phase and size."""

    size: str
    """In words, `32 requests`; empty where the annotations do not say it."""
    count: int
    median_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracePhase:
    """The steps of one phase, by the spans of their annotations."""

    name: str
    count: int
    """Steps."""
    total_us: float
    sizes: tuple[PhaseSize, ...]
    """The most frequent first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """What one step cost, with the kernels that it launched, however late they ran."""

    phase: str
    size: str
    process: str
    """The process whose step it is; empty for the whole trace. A report of Nsight Systems has those of all ranks."""
    begin_us: float
    """From the first event of the trace; where the step before it was still running then, from its end."""
    figures: dict[str, float]
    """`step us` until its annotation and its last kernel have ended, `between steps us` since the one before it,
    `device busy us` with streams side by side counted once, calls, operators, and kernels by category."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOperator:
    """One operator, or one kernel of the GPU, within one phase; every event of it is counted."""

    name: str
    short_name: str
    """For people: of a kernel without namespaces and arguments."""
    category: str | None
    """What a kernel is for, by its name; None for an operator."""
    phase: str | None
    """None outside of every phase."""
    device: str
    """`cpu` for operators, `gpu` for kernels, copies and fills; `call` for the runtime's, `python` for functions."""
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
class TraceRate:
    """All calls of one operator with inputs of one shape and dtype, whose work follows from these."""

    name: str
    shapes: str
    """Of the tensors among its inputs: `[128, 256] [256, 512]`."""
    count: int
    time_us: float
    """Of the kernels that it launched, or of the operator where the trace has no kernels."""
    flops: int
    """Of all calls; 0 for an operator that is no matrix product."""
    num_bytes: int
    """Of the inputs and the result, of all calls: what memory must move at least. 0 where the dtypes are not known."""
    has_device: bool
    peak_flops_per_s: float | None
    """Of the card with these dtypes, by its data sheet; None for a card that is not known."""
    peak_bytes_per_s: float | None

    @property
    def flops_per_s(self) -> float:
        """The rate of arithmetic that it reached."""
        return self.flops / self.time_us * 1e6 if self.time_us else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate of memory that it reached at least; above the peak, a cache held what it read."""
        return self.num_bytes / self.time_us * 1e6 if self.time_us else 0.0


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
    in_graph_us: float
    """Between two nodes of one replay of a graph."""
    other_us: float
    """The kernel was launched in time and began later: it waited for another stream, a copy or an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """The calls that launched a device's kernels, copies and fills; one call launches a whole graph."""

    num_launches: int
    num_unknown: int
    """Kernels whose launch the trace does not show."""
    call_us: float
    """Spent in the calls."""
    delay_us_median: float
    """From the end of the call to the begin of its first kernel."""
    delay_us_max: float
    num_shorter_than_launch: int
    """Calls whose kernels together took less time than the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReplays:
    """The replays of graphs with one number of nodes on a device."""

    num_nodes: int
    """Kernels, copies and fills of a replay."""
    count: int
    call_us: float
    """Spent in the launching calls."""
    replay_us_median: float
    """From the begin of a replay's first node to the end of its last."""
    replay_us_max: float
    slowest: int
    """Index of the slowest replay among these, in order of time."""
    slowest_at_us: float
    """Its begin, from the first event of the trace."""
    inside_idle_us: float
    """Within all replays, while no node ran."""
    between_idle_us: float
    """Between a replay and the next of the same size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Collectives, and how much of them other kernels hide."""

    num_kernels: int
    total_us: float
    hidden_us: float
    """While some other kernel computed."""
    compute_us: float
    """While some kernel that is no collective and no copy ran."""
    durations_us: dict[str, tuple[float, ...]]
    """Of each kernel, by name, in order of time."""

    @property
    def hidden_share(self) -> float:
        """Of the collectives' time."""
        return self.hidden_us / self.total_us if self.total_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """One GPU in a trace."""

    IN_DOCUMENT: ClassVar = ("num_launches",)
    device: int
    """Number of the process that its events are under, in order of appearance."""
    name: str
    """`GPU 0`, by its index in the trace."""
    span_us: float
    """From its first kernel to the end of its last."""
    busy_us: float
    """While at least one kernel, copy or fill ran."""
    idle: tuple[IdleTime, ...]
    """By stream."""
    launches: Launches
    graphs: tuple[GraphReplays, ...]
    """By number of nodes; empty without graphs."""
    communication: Communication | None
    """None without collectives."""

    @property
    def num_launches(self) -> int:
        """Calls that launched something; a graph is one."""
        return self.launches.num_launches


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """One trace."""

    path: str
    num_events: int
    """Of every kind, metadata too."""
    left_out: tuple[str, ...]
    """In words, what the file has and the figures do not count."""
    duration_us: float
    """From the begin of the first event to the end of the last."""
    phases: tuple[TracePhase, ...]
    """In order of their first step."""
    steps: tuple[TraceStep, ...]
    """In order of time; those within others are left out. Of a trace without steps, one that is all of it."""
    operators: tuple[TraceOperator, ...]
    """The one with the longest time of its own first."""
    host: tuple[TraceOperator, ...]
    """Calls of the device's runtime, and Python functions; empty where no difference is made."""
    operations: tuple[TraceOperation, ...]
    """In order of their first appearance; empty for a trace without spans of ours."""
    modules: tuple[TraceModule, ...] = ()
    """In order of their first call; empty if the trace has no `nn.Module` events."""
    module_kernels: tuple[ModuleKernel, ...] = ()
    """Those that take longest first; empty if the trace has no `nn.Module` events, or no kernels."""
    rates: tuple[TraceRate, ...] = ()
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
class StepFigure:
    """One figure of a step, before and after: medians over the steps."""

    name: str
    """As in `TraceStep.figures`; it ends with `us` if it is a time."""
    before: float
    after: float
    noise: float | None
    """What the change would be from run to run, by the spread of the steps; None for single steps."""

    @property
    def added(self) -> float:
        """After minus before."""
        return self.after - self.before

    @property
    def is_change(self) -> bool:
        """Whether it changed by more than noise, and by a hundredth."""
        return abs(self.added) > max(self.noise or 0.0, 0.01 * abs(self.before))


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange:
    """The steps of one phase, before and after."""

    phase: str
    num_steps_before: int
    num_steps_after: int
    sizes_before: tuple[str, ...]
    """The most frequent first; empty where the annotations do not say them."""
    sizes_after: tuple[str, ...]
    measures: tuple[StepFigure, ...]
    """`step us` first, then where the time went."""

    def measure(self, name: str) -> StepFigure:
        """Return the measure of that name; of one that neither side has, zeros."""
        none = StepFigure(name=name, before=0.0, after=0.0, noise=None)
        return next((measure for measure in self.measures if measure.name == name), none)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """One operator, kernel, call, Python function, operation or module within one phase; 0 if it does not occur.

    The counts and times of an `operation` are of the operators in it and of all of it, those of a `module` likewise.
    """

    phase: str | None
    name: str
    short_name: str
    category: str | None
    device: str
    count_before: int
    count_after: int
    self_us_before: float
    self_us_after: float
    num_steps_before: int
    """Of the phase; 1 outside of every phase, or where one side has no such step."""
    num_steps_after: int

    @property
    def is_of_count(self) -> bool:
        """Whether it runs more or less often in a step: such a change is exact, one of time may be noise."""
        return self.count_before * self.num_steps_after != self.count_after * self.num_steps_before

    @property
    def added_count(self) -> float:
        """More calls in a step; negative if fewer."""
        return self.count_after / self.num_steps_after - self.count_before / self.num_steps_before

    @property
    def added_us(self) -> float:
        """More time in a step; negative if less."""
        return self.self_us_after / self.num_steps_after - self.self_us_before / self.num_steps_before


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff:
    """Two traces, one against the other."""

    before: TraceSummary
    after: TraceSummary
    sentence: str
    """What made it slower, or faster, or that nothing did."""
    phases: tuple[PhaseChange, ...]
    """Those that both have."""
    unlike: tuple[str, ...]
    """Phases whose steps are of other sizes before and after."""
    changes: tuple[OperatorChange, ...]
    """Changes of count first, then those of time alone; the largest first in either part."""
