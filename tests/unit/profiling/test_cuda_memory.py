"""The memory pass on CUDA, with an allocator made up: what is captured is the window's, whatever came before."""

from dataclasses import dataclass, field

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.profiling import timing
from harness.profiling.memory.capture import capture_memory
from harness.profiling.memory.timeline import PersistentBlock
from harness.results.profile import MemoryCategory

WEIGHT, CACHE = 100, 200
"""Addresses of what is there all the time."""


@dataclass
class Allocator:
    """Blocks by address, and the history while it is recorded."""

    blocks: dict[int, int] = field(default_factory=lambda: {WEIGHT: 1000, CACHE: 5000})
    history: list[dict] | None = None
    time_us: int = 0

    def happens(self, action: str, address: int, size: int) -> None:
        self.time_us += 1
        if self.history is not None:
            self.history.append(
                {"action": action, "addr": address, "size": size, "time_us": self.time_us, "frames": []}
            )

    def alloc(self, address: int, size: int) -> None:
        self.blocks[address] = size
        self.happens("alloc", address, size)

    def free(self, address: int) -> None:
        self.happens("free_completed", address, self.blocks.pop(address))

    def snapshot(self) -> dict:
        blocks = [{"address": at, "size": size, "state": "active_allocated"} for at, size in self.blocks.items()]
        blocks.append({"address": 9, "size": 10**6, "state": "inactive"})
        return {
            "segments": [
                {"device": 0, "address": 9, "total_size": 10**7, "blocks": blocks},
                {"device": 1, "address": 7, "total_size": 10**7, "blocks": [{**blocks[0], "address": 7}]},
            ],
            "device_traces": [list(self.history or [])],
        }

    def record(self, *, enabled: str | None, **_options: object) -> None:
        self.history = [] if enabled else None


@pytest.fixture
def allocator(monkeypatch):
    made = Allocator()
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", made.snapshot)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", made.record)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: made.history is not None, raising=False)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    held = [
        PersistentBlock(address=WEIGHT, num_bytes=1000, category=MemoryCategory.WEIGHTS, name="w"),
        PersistentBlock(address=CACHE, num_bytes=5000, category=MemoryCategory.KV_CACHE, name="KV cache"),
    ]
    monkeypatch.setattr("harness.profiling.memory.capture._held", lambda session: held)
    return made


@pytest.fixture
def capture(allocator, reference, find_window, tmp_path, monkeypatch):
    """Capture a phase of an engine that needs 30,000 bytes for a step of prefill and 10 for one of decode.

    A block of prefill's is freed by the second step of decode.
    """

    def captured(phase):
        window = find_window(reference, phase, wait=0, warmup=0)
        step, num_steps, is_watched = reference.step, [0], []

        def stepping():
            is_watched.append(reference._session._engine.observer is not None)
            requests = step()
            size = 10 if num_steps[0] else 30_000
            allocator.alloc(300, size)
            allocator.alloc(400 + num_steps[0], 1)
            allocator.free(300)
            if num_steps[0]:
                allocator.free(399 + num_steps[0])
            num_steps[0] += 1
            return requests

        monkeypatch.setattr(reference, "step", stepping)
        captured = capture_memory(reference, window, tmp_path / "a.pickle", device="cuda")
        assert all(is_watched), "graphs that are replayed allocate nothing"
        return window, captured.timeline

    return captured


def test_decodes_peak_is_its_own(capture):
    window, timeline = capture("decode")
    assert timeline.peak.allocated_bytes == 6000 + 1 + 1 + 10
    assert timeline.points[0].allocated_bytes == 6000 + 1, "what prefill has left"
    assert timeline.num_allocations == 2 * len(window.steps)
    assert timeline.num_kept == 1


def test_prefills_peak_is_its_own(capture):
    _, timeline = capture("prefill")
    assert timeline.peak.allocated_bytes == 6000 + 30_000 + 1
    assert (timeline.num_allocations, timeline.num_kept) == (2, 1)


def test_a_history_of_another_recorder_is_left_alone(capture, allocator):
    allocator.history = [{"action": "alloc", "addr": 1, "size": 2, "time_us": 3}]
    with pytest.raises(HarnessError) as caught:
        capture("prefill")
    assert caught.value.code is Code.RECORDER_RUNNING
    assert allocator.history
