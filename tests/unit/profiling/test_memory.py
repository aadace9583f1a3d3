"""The memory pass: allocations and frees balance, categories add up, and the snapshot is one that viewers read."""

import pickle
import pickletools
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.errors import Code, HarnessError
from harness.profiling.formulas import kv_bytes
from harness.profiling.memory.capture import build_snapshot, capture_memory
from harness.profiling.memory.summary import summarize_memory
from harness.profiling.memory.timeline import Allocation, PersistentBlock, build_timeline
from harness.results.profile import Frame, MemoryCategory

CATEGORIES = list(MemoryCategory)
KV = CATEGORIES.index(MemoryCategory.KV_CACHE)
WEIGHTS = CATEGORIES.index(MemoryCategory.WEIGHTS)


@pytest.fixture(scope="module", params=["prefill", "decode"])
def captured(request, session, find_window, tmp_path_factory):
    """The window, the timeline and the snapshot of a phase."""
    window = find_window(session, request.param)
    path = tmp_path_factory.mktemp("memory") / "a.pickle"
    capture = capture_memory(session, window, path, device="cpu")
    return window, capture.timeline, path


@pytest.mark.sampled(1)
def test_allocations_and_frees_balance(captured):
    _, timeline, _ = captured
    assert timeline.num_allocations > 100
    assert (timeline.num_frees, timeline.num_kept) == (timeline.num_allocations, 0)


def test_the_timeline_adds_up(captured, session):
    _, timeline, _ = captured
    assert all(sum(point.by_category) == point.allocated_bytes for point in timeline.points)
    assert all(min(point.by_category) >= 0 for point in timeline.points)
    assert timeline.peak in timeline.points
    assert timeline.peak.allocated_bytes == max(point.allocated_bytes for point in timeline.points)
    times = [point.time_us for point in timeline.points]
    assert times == sorted(times)
    storages = {weight.untyped_storage().data_ptr(): weight.nbytes for weight in session.weights().values()}
    assert {point.by_category[WEIGHTS] for point in timeline.points} == {sum(storages.values())}


def test_a_growing_cache_is_what_the_formula_says(captured, session):
    window, timeline, _ = captured
    if "mixed" in session.phases:
        pytest.skip("this engine's cache is there from the beginning")
    assert timeline.points[-1].by_category[KV] == kv_bytes(session.model, window.shapes_so_far)


def test_the_peak_has_a_stack_of_real_files_and_modules(captured):
    _, timeline, _ = captured
    stack = timeline.stacks[timeline.peak.stack]
    assert any(frame.filename.endswith(".py") and frame.line > 0 for frame in stack)
    assert any(frame.name.startswith(("model.", "lm_head", "engine.")) for frame in stack)
    assert "aten::" in stack[0].name


def test_the_snapshot_is_plain_and_of_the_allocators_schema(captured):
    _, timeline, path = captured
    content = path.read_bytes()
    opcodes = Counter(opcode.name for opcode, _, _ in pickletools.genops(content))
    assert not {"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ"} & set(opcodes), "plain types only"
    assert next(argument for opcode, argument, _ in pickletools.genops(content) if opcode.name == "PROTO") == 4
    snapshot = pickle.loads(content)
    (trace,) = snapshot["device_traces"]
    actions = Counter(event["action"] for event in trace)
    assert set(actions) == {"alloc", "free_requested", "free_completed"}
    assert actions["alloc"] == timeline.num_allocations
    assert actions["free_requested"] == actions["free_completed"]
    alive = sum(block["size"] for segment in snapshot["segments"] for block in segment["blocks"])
    assert alive == timeline.points[-1].allocated_bytes
    assert all(segment["total_size"] == segment["blocks"][0]["size"] for segment in snapshot["segments"])


def test_a_snapshot_that_is_read_again_has_the_same_peak(captured):
    _, timeline, path = captured
    (device,) = summarize_memory(path).devices
    assert device.peak_bytes == timeline.peak.allocated_bytes
    assert {item.category for item in device.at_peak} <= {category.value for category in MemoryCategory}


def test_replaying_the_snapshot_backwards_is_consistent(captured):
    """What the public viewer does: from what is alive at the end, undo the events one by one."""
    _, _, path = captured
    snapshot = pickle.loads(path.read_bytes())
    alive = {segment["address"]: segment["total_size"] for segment in snapshot["segments"]}
    for event in reversed(snapshot["device_traces"][0]):
        if event["action"] == "alloc":
            assert alive.pop(event["addr"]) == event["size"]
        elif event["action"] == "free_completed":
            assert event["addr"] not in alive
            alive[event["addr"]] = event["size"]


def test_a_running_profiler_is_left_alone(reference, find_window, tmp_path):
    window = find_window(reference, "prefill")
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(HarnessError) as caught:
        capture_memory(reference, window, tmp_path / "a.pickle", device="cpu")
    assert caught.value.code is Code.RECORDER_RUNNING
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_leak_is_counted(reference, find_window, tmp_path, monkeypatch):
    window = find_window(reference, "decode")
    kept, original = [], reference.step

    def step():
        requests = original()
        kept.append(torch.ones(1000))
        return requests

    monkeypatch.setattr(reference, "step", step)
    timeline = capture_memory(reference, window, tmp_path / "a.pickle", device="cpu").timeline
    assert timeline.num_kept == len(window.steps)


def allocation(time_us, num_bytes, freed_us=None, category=MemoryCategory.ACTIVATIONS):
    frames = (Frame(filename="a.py", line=int(time_us), name="f"),)
    return Allocation(
        time_us=time_us, address=int(time_us), num_bytes=num_bytes, frames=frames, freed_us=freed_us, category=category
    )


HELD = [PersistentBlock(address=9000, num_bytes=50, category=MemoryCategory.WEIGHTS, name="w")]


def test_a_timeline_begins_with_what_was_there():
    before, within = allocation(1, 7, freed_us=15), allocation(12, 30, freed_us=20)
    timeline = build_timeline([before, within], HELD, begin=10, end=18)
    assert [(point.time_us, point.allocated_bytes) for point in timeline.points] == [(0, 57), (2, 87), (5, 80)]
    assert timeline.stacks[timeline.peak.stack] == within.frames
    assert (timeline.num_allocations, timeline.num_frees) == (1, 1)


def test_a_long_timeline_keeps_its_peak():
    allocations = [allocation(at, 100 if at == 517 else 1, freed_us=at + 0.5) for at in range(1, 1000)]
    timeline = build_timeline(allocations, HELD, begin=0, end=2000, max_points=50)
    assert len(timeline.points) <= 50
    assert timeline.peak.allocated_bytes == 150
    assert timeline.peak in timeline.points


def test_a_snapshot_holds_what_is_alive_at_its_end():
    early, late = allocation(1, 7, freed_us=15), allocation(12, 30, freed_us=20)
    snapshot = build_snapshot([early, late], HELD, begin=10, end=18)
    assert [segment["address"] for segment in snapshot["segments"]] == [12, 9000]
    assert [(event["action"], event["addr"]) for event in snapshot["device_traces"][0]] == [
        ("alloc", 12), ("free_requested", 1), ("free_completed", 1)
    ]  # fmt: skip
    assert snapshot["segments"][1]["blocks"][0]["frames"] == [{"filename": "", "line": 0, "name": "w"}]
