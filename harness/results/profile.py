"""What a profile found, as plain data: the reports and the gates know nothing else, and need no torch.

Units are in the names. What could not be measured is None, never 0.
"""

from dataclasses import dataclass
from enum import StrEnum


class BoundBy(StrEnum):
    """The resource that limits a phase or an operation."""

    COMPUTE = "compute"
    """The machine's matrix-product rate: its roof is the lower one at this arithmetic intensity."""
    MEMORY = "memory"
    """The machine's memory bandwidth: its roof is the lower one at this arithmetic intensity."""
    OVERHEAD = "overhead"
    """Neither: it reaches less than a tenth of the lower roof, so that time goes elsewhere (the host, mostly)."""


class MemoryCategory(StrEnum):
    """The use of a piece of memory."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    ACTIVATIONS = "activations"
    """Made by one operation and read by a later one."""
    TEMPORARY = "temporary"
    """Made and freed within one operation."""
    OTHER = "other"
    """Made outside of every named operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of one latency over all of its samples."""

    median: float
    p90: float
    p99: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The rows of one step."""

    phase: str
    """`prefill`, `decode` or `mixed`."""
    query_lens: tuple[int, ...]
    """Rows (tokens) of each request in the step."""
    context_lens: tuple[int, ...]
    """Tokens of each request that are in the cache once the step is done."""
    num_sampled: int
    """Rows whose logits are computed."""

    @property
    def num_rows(self) -> int:
        """Tokens computed in the step."""
        return sum(self.query_lens)

    @property
    def label(self) -> str:
        """Return the step's name in a trace: `prefill[bs=1 toks=128 kv=0]`, kv being the tokens cached before it."""
        num_cached = sum(self.context_lens) - self.num_rows
        return f"{self.phase}[bs={len(self.query_lens)} toks={self.num_rows} kv={num_cached}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCount:
    """Exact counts of one dispatched operator within one operation of a phase, over all of the phase's steps."""

    operation: str
    """Tap name without the layer, `self_attn.q_proj`; `engine.prepare` and so on for what is no operation."""
    operator: str
    """`aten::mm`."""
    count: int
    """Times it was dispatched."""
    flops: int
    """Of matrix products and attention, a multiply-add counting as two; 0 for every other operator."""
    elementwise_flops: int
    """One for each input element of a pointwise operator or a reduction."""
    bytes_moved: int
    """Bytes of its inputs and outputs; 0 for views."""
    bytes_allocated: int
    """Bytes of outputs that share no storage with an input."""
    places: tuple[tuple[str, int], ...] = ()
    """The functions that dispatched it, `package.module.Class.function`, and how often each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One row of a table of times, from the trace; the profiler's own cost is inside."""

    name: str
    calls: int
    total_us: float
    self_us: float
    """Without what is nested in it and has a row in the same table."""
    share: float
    """Of the phase's wall time, by self time."""
    num_collapsed: int = 1
    """Identical layers that this row sums up."""
    spread: tuple[float, float] | None = None
    """Smallest and largest total_us among the collapsed ones."""
    device_us: float | None = None
    """Time of the GPU kernels launched inside; None if the trace has no kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One operation, summed over layers and steps, or a whole phase, under the machine's two roofs."""

    name: str
    flops: int
    bytes_moved: int
    """The least bytes to read and write, by formula."""
    time_us: float | None
    """For a phase the time without a profiler; for an operation that of the trace, of its kernels on a GPU."""
    intensity: float
    """FLOPs per byte."""
    bound_by: BoundBy


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The rates that the machine reaches, measured just before the profile."""

    copy_bytes_per_s: float
    """Bytes read plus bytes written by a copy larger than any cache."""
    matmul_flops_per_s: float
    """Of a square product in the profile's dtype, with the profile's number of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One level of a stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Memory in use right after one allocation or free."""

    time_us: float
    """Since the phase's first event."""
    allocated_bytes: int
    """All categories together."""
    by_category: tuple[int, ...]
    """Bytes of each category, in the order of `MemoryCategory`."""
    stack: int | None
    """Index into the timeline's stacks of what made the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Memory over the steps of one phase."""

    points: tuple[MemoryPoint, ...]
    """At most a few thousand; of longer ones the peaks are kept."""
    stacks: tuple[tuple[Frame, ...], ...]
    """Innermost frame first."""
    peak: MemoryPoint | None
    num_allocations: int
    """During the captured steps."""
    num_frees: int
    """During the captured steps, of what was allocated in them."""
    num_kept: int
    """Allocations of the captured steps that are still alive after the requests are gone; 0 unless something leaks or
    is cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseProfile:
    """One phase of one engine. Counts are sums over `steps`, and so are times."""

    name: str
    steps: tuple[StepShape, ...]
    wall_ms: float
    """Without a profiler; the median over the repeats."""
    trace_wall_ms: float
    """With one: what the shares in the tables are shares of."""
    attributed_share: float
    """Of trace_wall_ms, the part inside of a named operation."""
    flops_measured: int
    flops_formula: int
    bytes_formula: int
    kv_bytes_measured: int
    """K and V stored since the requests began, up to the phase's last step."""
    kv_bytes_formula: int
    """2 * layers * kv_heads * head_dim * dtype bytes * tokens."""
    peak_bytes: int | None
    """None where torch does not allocate what the engine uses, as are then `bytes_allocated`, `memory`, `snapshot`."""
    bytes_allocated: int | None
    num_python_calls: int
    mfu: float
    mbu: float
    bound_by: BoundBy
    counts: tuple[OperatorCount, ...]
    layers: tuple[TableRow, ...]
    operations: tuple[TableRow, ...]
    """By tap name without the layer, the unattributed time last."""
    operators: tuple[TableRow, ...]
    """Every dispatched operator of the trace: what `key_averages` shows, but all events counted."""
    roofline: tuple[RooflinePoint, ...]
    """The phase first, then its operations."""
    memory: MemoryTimeline | None
    traces: tuple[str, ...]
    """Paths of the Chrome traces, one a cycle of the schedule, relative to the output folder."""
    snapshot: str | None
    """Path of the memory snapshot, likewise."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader of these figures."""
    wall_ms_range: tuple[float, float] | None = None
    """Of the fastest and of the slowest run."""
    cpu_ms: float | None = None
    """CPU time of the process in the same steps, of all its threads; the median over the runs."""
    num_involuntary_switches: float | None = None
    """Times that the system took a core away in them; the median over the runs."""
    bound_by_within_noise: tuple[BoundBy, ...] = ()
    """`bound_by` by the median, the fastest and the slowest run, and the CPU time: all that noise leaves open."""

    @property
    def num_steps(self) -> int:
        """Steps that were captured."""
        return len(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Time of the captured steps in each pass, as a ratio to the same steps without a profiler."""

    trace: float
    memory: float | None
    counters: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """A whole profile: one engine, one workload, every phase."""

    engine: str
    model: str
    dtype: str
    device: str
    batch_size: int
    num_prompt_tokens: int
    """Of each prompt; of the longest where they differ."""
    max_new_tokens: int
    """Likewise."""
    ttft_ms: Percentiles
    """From the arrival of all requests to the first token of each."""
    tpot_ms: Percentiles | None
    """Of each request: the mean time between its tokens after the first; None if there is no second one."""
    inter_token_ms: Percentiles | None
    """Every single gap between two tokens of a request; None likewise."""
    tokens_per_second: float
    """Generated tokens of all requests over the whole time, the prompts included."""
    phases: tuple[PhaseProfile, ...]
    overhead: Overhead
    ceilings: Ceilings
    environment: tuple[tuple[str, str], ...]
    """Versions, threads, machine: what figures are compared under."""
    report: str | None = None
    """Path of the HTML report, relative to the output folder."""
    notes: tuple[str, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    """Tokens of each request's prompt, and the new ones that follow it."""

    @property
    def up_to(self) -> str:
        """Return the words before the lengths of all requests: `up to ` where these differ, else nothing."""
        return "up to " if len(set(self.lengths)) > 1 else ""
