"""Allocations paired with their frees, and what each was for."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from harness.profiling.trace.nodes import MemoryEvent, Node
from harness.results.profile import Frame, MemoryCategory

MAX_FRAMES = 32
"""Innermost frames of a stack that are kept."""


@dataclass(slots=True, kw_only=True, eq=False)
class Allocation:
    """One block from its allocation to its free. Times in microseconds."""

    time_us: float
    address: int
    num_bytes: int
    frames: tuple[Frame, ...]
    """Innermost first."""
    within: Node | None = None
    """The operation's span it was allocated in."""
    freed_us: float | None = None
    freed_frames: tuple[Frame, ...] = ()
    freed_within: Node | None = None
    category: MemoryCategory = MemoryCategory.OTHER

    def is_alive(self, time_us: float) -> bool:
        """Whether the block exists at that time."""
        return self.time_us <= time_us and (self.freed_us is None or self.freed_us > time_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistentBlock:
    """A block that was there before the capture began, and stays."""

    address: int
    num_bytes: int
    category: MemoryCategory
    name: str
    """The parameter, or what else it is."""


def match(
    events: Iterable[MemoryEvent], *, names: Collection[str], frames: Callable[[MemoryEvent], tuple[Frame, ...]]
) -> list[Allocation]:
    """Pair each allocation with the free of its address that follows.

    Events are in order of time. The spans of the operations `names` tell what is temporary; `frames` returns the stack
    that an event has happened in.
    """
    found: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    for event in events:
        span = _span(event, names)
        if event.num_bytes > 0:
            allocation = Allocation(
                time_us=event.time_us,
                address=event.address,
                num_bytes=event.num_bytes,
                frames=frames(event),
                within=span,
            )
            alive[event.address] = allocation
            found.append(allocation)
        elif (freed := alive.pop(event.address, None)) is not None:
            freed.freed_us, freed.freed_within, freed.freed_frames = event.time_us, span, frames(event)
    return found


def categorize(allocations: Iterable[Allocation], kv_storages: Mapping[float, Collection[int]]) -> None:
    """Say of each block what it was for.

    `kv_storages` has for the end of each step its time and the addresses that K and V are kept at then.
    """
    for allocation in allocations:
        if any(
            allocation.address in addresses and allocation.is_alive(time_us)
            for time_us, addresses in kv_storages.items()
        ):
            allocation.category = MemoryCategory.KV_CACHE
        elif allocation.within is None:
            allocation.category = MemoryCategory.OTHER
        elif allocation.within is allocation.freed_within:
            allocation.category = MemoryCategory.TEMPORARY
        else:
            allocation.category = MemoryCategory.ACTIVATIONS


def stack(event: MemoryEvent) -> tuple[Frame, ...]:
    """Return an event's stack, the innermost frame first: operators, operations and Python functions mixed."""
    around = () if event.within is None else event.within.around(event.time_us)
    return tuple(_frame(node) for node in islice(around, MAX_FRAMES))


def _frame(node: Node) -> Frame:
    """Take `torch/nn/functional.py(1693): relu` apart; an operator or an operation has no file."""
    place, colon, name = node.name.partition("): ")
    filename, parenthesis, line = place.rpartition("(")
    if node.category != "python_function" or not (colon and parenthesis and line.isdecimal()):
        return Frame(filename="", line=0, name=node.name)
    return Frame(filename=filename, line=int(line), name=name)


def _span(event: MemoryEvent, names: Collection[str]) -> Node | None:
    around = () if event.within is None else event.within.around(event.time_us)
    return next((node for node in around if node.name in names), None)
