"""The CUDA allocator's snapshots as allocations: what is there, and what has happened.

Written after torch's schema, and not measured on a GPU yet.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from harness.profiling.memory.allocations import Allocation
from harness.results.profile import Frame, MemoryCategory

EARLIER_US = -1.0
"""When a block was allocated whose allocation no history shows."""


def read_cuda_blocks(snapshot: Mapping[str, Any], device: int, left_out: Collection[int]) -> list[Allocation]:
    """Return what is allocated on a device at the time of a snapshot, but for blocks at some addresses."""
    blocks = (block for segment in snapshot["segments"] if segment["device"] == device for block in segment["blocks"])
    return [
        Allocation(time_us=EARLIER_US, address=block["address"], num_bytes=block["size"], frames=())
        for block in blocks
        if block["state"] == "active_allocated" and block["address"] not in left_out
    ]


def read_cuda_history(
    snapshot: Mapping[str, Any], device: int, max_frames: int, earlier: Sequence[Allocation] = ()
) -> list[Allocation]:
    """Return the `earlier` allocations, freed where the history says so, and after them those of the history.

    Spans are not known here, so that activations cannot be told from what is temporary: all are activations.
    """
    found = list(earlier)
    alive = {allocation.address: allocation for allocation in earlier}
    for event in snapshot["device_traces"][device]:
        frames = _frames(event.get("frames", ())[:max_frames])
        if event["action"] == "alloc":
            alive[event["addr"]] = Allocation(
                time_us=float(event["time_us"]),
                address=event["addr"],
                num_bytes=event["size"],
                frames=frames,
                category=MemoryCategory.ACTIVATIONS,
            )
            found.append(alive[event["addr"]])
        elif event["action"] == "free_completed" and (freed := alive.pop(event["addr"], None)) is not None:
            freed.freed_us, freed.freed_frames = float(event["time_us"]), frames
    return found


def _frames(frames: Iterable[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(filename=frame["filename"], line=frame["line"], name=frame["name"]) for frame in frames)
