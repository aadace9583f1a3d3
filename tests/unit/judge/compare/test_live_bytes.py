"""How many bytes of tensors the replay of a long prompt holds at most, in those of the rows of one layer.

What torch's operators return is counted while anything refers to it, so the count repeats exactly. What a kernel holds
inside of it, and what the allocator keeps free, is not counted.
"""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.formats.recording import Recording
from harness.judge.compare import local, run
from harness.judge.jobs.check import run_check
from harness.oracle.turns import Ahead
from tests.benchmarks.check_growth import Size, plan_of, save


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operators return, and the most that were there at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._alive = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in before:
                self._note(x.untyped_storage())
        return result

    def _note(self, storage):
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self._alive:
            return
        self._alive.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._alive.discard(key)
        self.now -= size


@pytest.fixture
def counted(monkeypatch):
    """Counts what the replays of a check hold, on the thread of the control, too."""
    live, advance, replayed = LiveBytes(), Ahead._run, local.local_errors

    def counted_run(self):
        with live:
            advance(self)

    def counted_errors(*args, **kwargs):
        with live:
            return replayed(*args, **kwargs)

    monkeypatch.setattr(Ahead, "_run", counted_run)
    monkeypatch.setattr(run, "local_errors", counted_errors)
    return live


@pytest.mark.slow
@pytest.mark.parametrize(("has_control", "bound"), [(False, 2.3), (True, 2.9)])
def test_a_replay_holds_few_times_the_rows_of_one_layer(tmp_path, monkeypatch, counted, has_control, bound):
    size = Size(tokens=2048)
    save(tmp_path / "model", size)
    monkeypatch.setattr(local, "needs_control", lambda *_: has_control)
    run_check(plan_of(tmp_path / "model", size), out=tmp_path / "out")
    (recording,) = (tmp_path / "out").glob("plain*")
    assert counted.most < bound * rows_of_a_layer(recording)
    assert counted.now == 0, "nothing is left in cycles of references"


def rows_of_a_layer(folder):
    with Recording.open(folder) as recording:
        step = recording.steps[0]
        taps = [step.tap(name) for name in step.tap_names if ".layers.1." in name]
        return sum(math.prod(rows.shape) * rows.element_size() for rows in taps)
