"""The CUDA allocator's history as allocations. Written after torch's schema, and not measured on a GPU yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.profile_results import Category, Frame
from harness.profiling.allocations import Allocation


def read_cuda_history(snapshot: Mapping[str, Any], device: int, max_frames: int) -> list[Allocation]:
    """Return the allocations of a snapshot's history of one device.

    Spans are not known here, so that activations cannot be told from what is temporary: all are activations.
    """
    found: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    for event in snapshot["device_traces"][device]:
        frames = _frames(event.get("frames", ())[:max_frames])
        if event["action"] == "alloc":
            alive[event["addr"]] = Allocation(
                time_us=float(event["time_us"]),
                address=event["addr"],
                num_bytes=event["size"],
                frames=frames,
                category=Category.ACTIVATIONS,
            )
            found.append(alive[event["addr"]])
        elif event["action"] == "free_completed" and (freed := alive.pop(event["addr"], None)) is not None:
            freed.freed_us, freed.freed_frames = float(event["time_us"]), frames
    return found


def _frames(frames: Iterable[Mapping[str, Any]]) -> tuple[Frame, ...]:
    return tuple(Frame(filename=frame["filename"], line=frame["line"], name=frame["name"]) for frame in frames)
