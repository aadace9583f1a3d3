"""A snapshot's history as allocations, and its timeline."""

import pytest

from harness.profiling.memory.snapshot_file import devices_of
from harness.profiling.memory.timeline import EARLIER_US, history_timeline, read_history
from harness.results.profile import Frame

FRAMES = [{"filename": "a.py", "line": 3, "name": "f"}, {"filename": "b.py", "line": 4, "name": "g"}]


def event(action, address, size, time_us, frames=(), **more):
    return {"action": action, "addr": address, "size": size, "time_us": time_us, "frames": list(frames), **more}


def device(*events, blocks=()):
    """Return the device of a snapshot; `blocks` are (address, bytes) in use at its end."""
    used = [{"address": at, "size": size, "state": "active_allocated", "frames": FRAMES} for at, size in blocks]
    segments = [{"device": 0, "address": 0, "total_size": 1000, "blocks": used}] if used else []
    (snapshot,) = devices_of({"segments": segments, "device_traces": [list(events)]})
    return snapshot


def test_each_allocation_has_its_free():
    first, second = read_history(
        device(
            event("segment_alloc", 0, 100, 1),
            event("alloc", 10, 5, 2, FRAMES),
            event("free_requested", 10, 5, 3),
            event("free_completed", 10, 5, 4),
            event("alloc", 10, 6, 5, category="kv_cache"),
            blocks=[(10, 6)],
        )
    )
    assert (first.num_bytes, first.time_us, first.freed_us, first.category) == (5, 2, 4, "other")
    assert first.frames == (Frame(filename="a.py", line=3, name="f"), Frame(filename="b.py", line=4, name="g"))
    assert (second.num_bytes, second.time_us, second.freed_us, second.category) == (6, 5, None, "kv_cache")


def test_what_was_there_before_stays_or_is_freed():
    untouched, freed, later = read_history(
        device(event("free_completed", 10, 5, 2, FRAMES), event("alloc", 10, 6, 3), blocks=[(10, 6), (20, 7)])
    )
    assert (untouched.address, untouched.num_bytes, untouched.time_us, untouched.freed_us) == (20, 7, EARLIER_US, None)
    assert (freed.num_bytes, freed.time_us, freed.freed_us, freed.frames) == (5, EARLIER_US, 2, ())
    assert len(freed.freed_frames) == 2
    assert (later.time_us, later.freed_us) == (3, None)


def test_a_free_that_the_history_has_lost():
    lost, later = read_history(device(event("alloc", 10, 5, 2), event("alloc", 10, 6, 4), blocks=[(10, 6)]))
    assert (lost.freed_us, later.freed_us) == (4, None)


def test_the_timeline_begins_with_what_was_there():
    events = [event("alloc", 10, 5, 100), event("free_completed", 10, 5, 130), event("free_completed", 30, 9, 140)]
    timeline = history_timeline(device(*events, blocks=[(20, 7)]))
    assert [(point.time_us, point.allocated_bytes) for point in timeline.points] == [
        (0, 16),
        (0, 21),
        (30, 16),
        (40, 7),
    ]
    assert timeline.peak.allocated_bytes == 21


def test_no_timeline_without_a_history():
    assert history_timeline(device(blocks=[(20, 7)])) is None


@pytest.mark.parametrize("category", ["parameter", ""])
def test_a_category_of_another_program(category):
    (allocation,) = read_history(device(event("alloc", 10, 5, 1, category=category)))
    assert allocation.category == "other"
