"""Contents of memory snapshots, and changes between two, as plain data for the reports. Nothing here imports torch."""

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlace:
    """The blocks that one place in the code has allocated."""

    place: str
    """`path/to/file.py:12 function`: the innermost line outside of torch; or the innermost frame there is."""
    operation: str | None
    """The engine's operation around it, in snapshots of `harness profile`."""
    category: str | None
    """What it is for, in snapshots of `harness profile`."""
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """An allocation that did not succeed."""

    requested_bytes: int
    device_free_bytes: int | None
    """Free memory of the device outside the allocator; None where the snapshot does not say."""
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGrowth:
    """What is in use after the steps of a phase, beyond what was there when the trace began."""

    IN_DOCUMENT: ClassVar = ("added_bytes_per_step",)
    phase: str
    num_steps: int
    first_bytes: int
    """After the first step."""
    last_bytes: int
    kept: tuple[MemoryPlace, ...]
    """The place that allocated most of what stayed, after the first step; empty if nothing did."""

    @property
    def added_bytes_per_step(self) -> float:
        """Increase per further step; 0 for a single step."""
        return (self.last_bytes - self.first_bytes) / max(1, self.num_steps - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """One device's memory: now, at its peak, and what stayed allocated."""

    IN_DOCUMENT: ClassVar = ("free_bytes",)
    device: int
    """Number of the GPU; -1 for the CPU, in traces."""
    reserved_bytes: int
    """Taken from the device by the allocator."""
    allocated_bytes: int
    """In use by tensors."""
    awaiting_free_bytes: int
    """Freed, and waiting for another stream."""
    requested_bytes: int
    """Requested bytes of `allocated_bytes`, before rounding up."""
    largest_free_bytes: int
    """The largest unused piece of a segment, private pools left out."""
    private_free_bytes: int
    """Unused in private pools, as of CUDA graphs: no other allocation can have it."""
    num_segments: int
    num_events: int
    """Of the history; 0 where none was recorded."""
    peak_bytes: int | None
    """The most that was in use during the history; None without one."""
    peak_after_us: float | None
    """From the first event of the history; None without one, or if its events have no times."""
    now: tuple[MemoryPlace, ...]
    """In use when the snapshot was taken, the most first."""
    at_peak: tuple[MemoryPlace, ...]
    kept: tuple[MemoryPlace, ...]
    """Allocated during the history, and still in use: over equal steps, what grows."""
    out_of_memory: tuple[OutOfMemory, ...]
    growth: tuple[StepGrowth, ...] = ()
    """By phase, of traces that have steps."""
    settings: str = ""
    """Of the allocator, those that are not the default: `expandable_segments:True`."""
    contradictions: tuple[str, ...] = ()
    """What in the history cannot be, in words: then the peak and the places may be wrong."""

    @property
    def free_bytes(self) -> int:
        """Reserved and in no use."""
        return self.reserved_bytes - self.allocated_bytes - self.awaiting_free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """One snapshot."""

    file: str
    devices: tuple[DeviceMemory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceChange:
    """What a place in the code holds in two snapshots."""

    IN_DOCUMENT: ClassVar = ("added_bytes",)
    device: int
    place: str
    before_bytes: int
    after_bytes: int

    @property
    def added_bytes(self) -> int:
        """More in the second one; negative if less."""
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDiff:
    """Two snapshots."""

    before: MemorySummary
    after: MemorySummary
    now: tuple[PlaceChange, ...]
    """Places that hold more or less when the snapshots were taken, the largest change first."""
    at_peak: tuple[PlaceChange, ...]


@dataclass(slots=True, kw_only=True)
class MemoryNode:
    """The blocks that were allocated in one call, and in those that it made."""

    name: str
    num_bytes: int = 0
    num_blocks: int = 0
    children: "dict[str, MemoryNode]" = field(default_factory=dict)

    def add(self, num_bytes: int) -> None:
        """Count a block."""
        self.num_bytes += num_bytes
        self.num_blocks += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMoment:
    """What one device holds at a time."""

    device: int
    at_ms: float
    """From the first event of the history."""
    root: MemoryNode
    """Of all calls; its children are the outermost ones."""
