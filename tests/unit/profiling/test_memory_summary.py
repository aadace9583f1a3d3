"""Snapshots of any program: what they hold, and pickles that are none."""

import json
import os
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import Code, HarnessError
from harness.profiling.memory.summary import diff_memory, summarize_memory, summarize_with_timelines
from harness.profiling.memory.tree import memory_at
from harness.report.document import files_document
from harness.report.memory import memory_diff_text, memory_text
from harness.results.memory import MemoryPlace

MIB = 2**20
TORCH = {"filename": "/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}
FORWARD = {"filename": "engine/model.py", "line": 12, "name": "forward"}
GROW = {"filename": "engine/cache.py", "line": 3, "name": "grow"}
CPP = {"filename": "??", "line": 0, "name": "at::native::empty"}


def event(action, address, size, time_us, *frames):
    return {"action": action, "addr": address, "size": size, "time_us": time_us, "frames": list(frames)}


def block(address, size, state="active_allocated", requested=None, frames=()):
    return {
        "address": address, "size": size, "requested_size": requested or size, "state": state, "frames": list(frames),
    }  # fmt: skip


def segment(blocks, device=0):
    total = sum(item["size"] for item in blocks)
    return {"device": device, "address": blocks[0]["address"], "total_size": total, "blocks": blocks}


SNAPSHOT = {
    "segments": [
        segment(
            [block(0, 4 * MIB, requested=3 * MIB, frames=[CPP, TORCH, FORWARD]), block(4 * MIB, 2 * MIB, "inactive")]
        ),
        segment([block(16 * MIB, MIB, "active_awaiting_free"), block(17 * MIB, 3 * MIB, frames=[GROW])]),
        segment([block(32 * MIB, 2 * MIB, "inactive")]),
    ],
    "device_traces": [
        [
            event("free_completed", 32 * MIB, 2 * MIB, 100),  # allocated before the history
            event("alloc", 17 * MIB, 3 * MIB, 110, GROW),
            event("alloc", 33 * MIB, 2 * MIB, 120, CPP, TORCH, FORWARD),
            event("free_requested", 33 * MIB, 2 * MIB, 130, FORWARD),
            event("free_completed", 33 * MIB, 2 * MIB, 130, FORWARD),
            {"action": "oom", "size": 3 * MIB, "device_free": MIB, "time_us": 140, "frames": [TORCH, FORWARD]},
        ]
    ],
}


@pytest.fixture
def write(tmp_path):
    def write(content, name="a.pickle"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=4))
        return path

    return write


def place(text, num_bytes):
    return MemoryPlace(place=text, operation=None, category=None, num_bytes=num_bytes, num_blocks=1)


def test_what_a_snapshot_holds(write):
    (device,) = summarize_memory(write(SNAPSHOT)).devices
    assert (device.reserved_bytes, device.allocated_bytes, device.requested_bytes) == (12 * MIB, 7 * MIB, 6 * MIB)
    assert (device.awaiting_free_bytes, device.free_bytes, device.largest_free_bytes) == (MIB, 4 * MIB, 2 * MIB)
    assert (device.num_segments, device.num_events) == (3, 6)
    assert device.now == (place("engine/model.py:12 forward", 4 * MIB), place("engine/cache.py:3 grow", 3 * MIB))
    assert device.kept == (place("engine/cache.py:3 grow", 3 * MIB),)
    assert (device.peak_bytes, device.peak_after_us) == (9 * MIB, 20)
    assert [(item.place, item.num_bytes) for item in device.at_peak] == [
        ("engine/model.py:12 forward", 6 * MIB), ("engine/cache.py:3 grow", 3 * MIB),
    ]  # fmt: skip
    (refused,) = device.out_of_memory
    assert (refused.requested_bytes, refused.device_free_bytes) == (3 * MIB, MIB)


def test_older_versions_of_torch_note_no_times(write):
    events = [{key: value for key, value in item.items() if key != "time_us"} for item in SNAPSHOT["device_traces"][0]]
    summary = summarize_memory(write(SNAPSHOT | {"device_traces": [events]}))
    assert (summary.devices[0].peak_bytes, summary.devices[0].peak_after_us) == (9 * MIB, None)
    assert "peak 9.00 MiB, in a history of 6 events without times" in memory_text([summary])


def test_what_is_free_in_the_pool_of_a_graph_fits_nothing_else(write):
    pool = segment([block(64 * MIB, 30 * MIB, "inactive")]) | {"segment_pool_id": (0, 1)}
    shared = [held | {"segment_pool_id": (0, 0)} for held in SNAPSHOT["segments"]]
    summary = summarize_memory(write(SNAPSHOT | {"segments": [*shared, pool]}))
    (device,) = summary.devices
    assert (device.free_bytes, device.private_free_bytes, device.largest_free_bytes) == (34 * MIB, 30 * MIB, 2 * MIB)
    text = memory_text([summary])
    assert "30.00 MiB of what is free are in private pools" in text
    assert "2.00 MiB would fit now, 5.00 if all of it were one piece" in text


def test_torch_is_known_by_its_folder_on_windows_too(write):
    functional = {"filename": r"C:\env\Lib\site-packages\torch\functional.py", "line": 373, "name": "einsum"}
    model = {"filename": r"D:\engine\model.py", "line": 12, "name": "forward"}
    held = segment([block(0, MIB, frames=[functional, model])])
    (device,) = summarize_memory(write({"segments": [held], "device_traces": []})).devices
    assert device.now == (place(r"D:\engine\model.py:12 forward", MIB),)


def test_the_timeline_has_the_same_peak(write):
    summary, (timeline,) = summarize_with_timelines(write(SNAPSHOT))
    (device,) = summary.devices
    assert (timeline.peak.allocated_bytes, timeline.peak.time_us) == (device.peak_bytes, device.peak_after_us)
    assert timeline.points[-1].allocated_bytes == device.allocated_bytes


def test_the_history_ends_with_the_blocks_and_not_with_what_was_requested(write):
    requested = [event("alloc", 0, 3 * MIB, 100, GROW), event("alloc", 8 * MIB, MIB, 110, FORWARD)]
    path = write(
        {"segments": [SNAPSHOT["segments"][0], segment([block(8 * MIB, 2 * MIB)])], "device_traces": [requested]}
    )
    (device,) = summarize_memory(path).devices
    assert device.allocated_bytes == 6 * MIB
    assert device.peak_bytes == 4 * MIB + MIB, "a block that was not of this size may have been another one"
    assert device.at_peak == (place("engine/cache.py:3 grow", 4 * MIB), place("engine/model.py:12 forward", MIB))
    (moment,) = memory_at(path, 0)
    assert moment.root.num_bytes == 4 * MIB


def test_what_did_not_fit_is_told(write):
    text = memory_text([summarize_memory(write(SNAPSHOT))])
    assert "out of memory: 3.00 MiB at engine/model.py:12 forward, the device had 1.00 MiB left" in text
    assert "it is free by now, in smaller pieces: fragmentation" in text


def test_what_has_no_operation_is_told_beside_what_has_one(write):
    summary = summarize_memory(write(SNAPSHOT))
    at_peak = (place("a", 2 * MIB), replace(place("b", MIB), operation="lm_head"))
    text = memory_text([replace(summary, devices=(replace(summary.devices[0], at_peak=at_peak),))])
    assert "by operation or module, in MiB: none of them 2.00, lm_head 1.00" in text
    assert "by category" not in text


def test_without_a_history_there_is_no_peak(write):
    (device,) = summarize_memory(write({**SNAPSHOT, "device_traces": [[]]})).devices
    assert (device.peak_bytes, device.peak_after_us, device.kept) == (None, None, ())
    assert "no history: torch.cuda.memory._record_memory_history()" in memory_text(
        [summarize_memory(write({**SNAPSHOT, "device_traces": [[]]}))]
    )


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    lost=st.integers(0, 20),
)
def test_the_peak_is_that_of_the_events_that_are_left(tmp_path_factory, sizes, order, lost):
    """Any order of allocations and frees, of whose history any part at the beginning is lost."""
    alive, totals, events = {}, [], []
    for _ in range(3 * len(sizes)):
        address = order.randrange(len(sizes))
        if address in alive:
            events.append(event("free_completed", address, alive.pop(address), len(events)))
        else:
            alive[address] = sizes[address]
            events.append(event("alloc", address, alive[address], len(events)))
        totals.append(sum(alive.values()))
    lost = min(lost, len(events) - 1)
    path = tmp_path_factory.mktemp("memory") / "a.pickle"
    segments = [segment([block(at, size) for at, size in alive.items()])] if alive else []
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events[lost:]]}))
    (device,) = summarize_memory(path).devices
    before = totals[lost - 1] if lost else 0
    assert device.peak_bytes == max(before, *totals[lost:])
    assert sum(item.num_bytes for item in device.at_peak) == device.peak_bytes


def test_what_changed_between_two(write):
    later = {**SNAPSHOT, "segments": [*SNAPSHOT["segments"], segment([block(64 * MIB, MIB, frames=[GROW])])]}
    diff = diff_memory(write(SNAPSHOT), write(later, "b.pickle"))
    assert [(item.place, item.added_bytes) for item in diff.now] == [("engine/cache.py:3 grow", MIB)]
    assert "in use: +1.00 MiB" in memory_diff_text(diff)


def test_devices_are_separate(write):
    snapshot = {"segments": [segment([block(0, 5)], device=3)], "device_traces": [[event("alloc", 7, 2, 0)]]}
    assert [device.device for device in summarize_memory(write(snapshot)).devices] == [0, 3]


def test_the_document_has_a_version(write):
    document = files_document([summarize_memory(write(SNAPSHOT))])
    assert document["schema_version"] == 1
    assert document["files"][0]["devices"][0]["free_bytes"] == 4 * MIB


class Running:
    def __reduce__(self):
        return os.system, ("echo it ran > ran",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "EOFError"),
        (b"not a pickle", "UnpicklingError"),
        (pickle.dumps(SNAPSHOT)[:-40], "truncated|EOFError"),
        (pickle.dumps(Running()), "names (posix|nt).system, and a snapshot holds plain data only"),
        ({"segments": Running(), "device_traces": []}, "plain data only"),
        ([], "list in the place of a dict"),
        ({}, "KeyError: 'segments'"),
        ({"segments": {}, "device_traces": []}, "'segments' is dict, and not list"),
        ({"segments": [segment([block(0, 5.0)])], "device_traces": []}, "float, and not int"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "frames": [7]}]]}, "int in the place of a dict"),
        ({"segments": [], "device_traces": [[{"action": "alloc", "frames": 7}]]}, "TypeError"),
        ({"segments": [], "device_traces": [[None]]}, "NoneType in the place of a dict"),
    ],
)
def test_what_is_no_snapshot_is_refused_and_nothing_is_run(write, tmp_path, monkeypatch, content, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError, match=words) as caught:
        summarize_memory(write(content))
    assert caught.value.code is Code.SNAPSHOT_UNREADABLE
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(HarnessError, match="FileNotFoundError") as caught:
        summarize_memory(tmp_path / "none")
    assert caught.value.code is Code.SNAPSHOT_UNREADABLE


def trace_file(path, events):
    """A trace with a module in each of three steps, and allocations in microseconds: (time, address, bytes)."""
    thread = {"pid": 1, "tid": 1}
    spans = [("user_annotation", f"ProfilerStep#{at}", 100 * at, 90) for at in range(3)]
    spans += [("python_function", "nn.Module: Linear_0", 100 * at + 10, 50) for at in range(3)]
    spans += [("python_function", "train.py(4): main", 0, 300)]
    written = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **thread} for cat, name, ts, dur in spans]
    for ts, address, size in events:
        arguments = {"Addr": address, "Bytes": size, "Device Id": -1, "Device Type": 0}
        written.append(
            {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": ts, "args": arguments, **thread}
        )
    path.write_text(json.dumps({"traceEvents": written}))
    return path


def test_the_memory_events_of_a_trace_are_a_history_with_steps_and_modules(tmp_path):
    kept = [(100 * at + 20, at, 1000) for at in range(3)]
    passing = [(130, 9, 5000), (140, 9, -5000)]
    path = trace_file(tmp_path / "trace.json", sorted(kept + passing))
    (cpu,) = summarize_memory(path).devices
    assert (cpu.device, cpu.num_segments, cpu.allocated_bytes, cpu.peak_bytes) == (-1, 0, 3000, 7000)
    (place,) = cpu.at_peak
    assert (place.place, place.operation, place.num_bytes) == ("train.py:4 main", "nn.Module: Linear_0", 7000)
    (growth,) = cpu.growth
    assert (growth.phase, growth.num_steps, growth.added_bytes_per_step) == ("ProfilerStep", 3, 1000)
    assert (growth.first_bytes, growth.last_bytes) == (1000, 3000)
    shown = memory_text([summarize_memory(path)])
    assert "trace.json, cpu" in shown
    assert "at the peak by operation or module, in MiB: nn.Module: Linear_0 0.01" in shown
    assert "growth +0.00 MiB a step over 3 of ProfilerStep, most at train.py:4 main, 2 blocks kept" in shown


def test_a_trace_without_memory_events_is_refused_with_what_records_them(tmp_path):
    with pytest.raises(HarnessError, match="profile_memory=True") as caught:
        summarize_memory(trace_file(tmp_path / "trace.json", []))
    assert caught.value.code is Code.SNAPSHOT_UNREADABLE


def test_a_history_that_contradicts_itself_is_told(write):
    events = [
        event("alloc", 0, 4 * MIB, 10), event("alloc", 0, 2 * MIB, 20),  # twice, without a free
        event("free_completed", 0, MIB, 15), event("free_completed", 0, MIB, 30),  # earlier, of another size; unknown
    ]  # fmt: skip
    summary = summarize_memory(write({"segments": [segment([block(99, MIB)])], "device_traces": [events]}))
    assert summary.devices[0].contradictions == (
        "1 allocations at an address that was in use",
        "1 frees of an address that was not in use",
        "1 frees of another size than was allocated",
        "1 events before the one ahead of them",
    )
    assert "the history contradicts itself" in memory_text([summary])
    lost = summarize_memory(write({"segments": [], "device_traces": [[event("alloc", 7, MIB, 1)]]}))
    assert lost.devices[0].contradictions == (
        "1 blocks that are in use at the end of the history or in the segments, and not in both",
    )
    assert summarize_memory(write(SNAPSHOT)).devices[0].contradictions == ()
    waiting = [segment([block(7, MIB, "active_awaiting_free")])]
    events = [event("alloc", 7, MIB, 1), event("free_requested", 7, MIB, 2)]
    assert summarize_memory(write({"segments": waiting, "device_traces": [events]})).devices[0].contradictions == ()


def test_settings_of_the_allocator_are_told_and_advised(write):
    settings = {"expandable_segments": True, "max_split_size": -1, "pinned_num_register_threads": 1}
    text = memory_text([summarize_memory(write({**SNAPSHOT, "allocator_settings": settings}))])
    assert "allocator: expandable_segments:True" in text
    assert "avoids" not in text
    assert "fragmentation, which expandable_segments:True avoids" in memory_text([summarize_memory(write(SNAPSHOT))])
    assert "2.00 MiB would fit now, 5.00 if all of it were one piece" in text
