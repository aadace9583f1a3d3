"""What a forward's modules were given and returned, and that it can be told to another process."""

import json

import torch
from torch import nn

from harness.engines.torch_modules import Calls, watched_calls


class Norm(nn.Module):
    def forward(self, x, residual=None):
        return x if residual is None else (x, residual.add_(x))


class Through(nn.Module):
    """As Cohere's norm in vLLM: the residual is returned as it was given."""

    def forward(self, x, residual):
        return x, residual


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.alone, self.paired, self.shared, self.unused = Norm(), Norm(), Norm(), Norm()
        self.through = Through()

    def forward(self, hidden_states):
        x = self.shared(self.shared(self.alone(hidden_states)))
        x, residual = self.paired(x, residual=x + 1)
        return self.through(x + 2, residual)[0]


def test_calls_of_a_forward():
    model = Twice()
    with watched_calls(model, num_rows=31) as found:
        model(torch.ones(31, 8))
    (calls,) = found
    assert set(calls.by_path) == {"", "alone", "paired", "through"}, "one is called twice, and one never"
    assert calls.by_path["alone"].outputs == ((31, 8),)
    assert calls.by_path["paired"].outputs == ((31, 8), (31, 8))
    assert calls.by_path["through"].outputs == ((31, 8), None), "a residual that is handed through is none"
    assert [calls.by_path[path].is_single for path in ("alone", "paired", "through")] == [True, False, True]
    assert calls.by_path["paired"].argument("residual") == calls.by_path["paired"].given(0) == (31, 8)
    assert calls.by_path["alone"].argument("residual") is calls.by_path["alone"].given(1) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_calls_are_told_to_another_process():
    model = Twice()
    with watched_calls(model, num_rows=31) as found:
        model(torch.ones(31, 8))
    told = Calls.from_json(json.loads(json.dumps(found[0].to_json())))
    assert told.holds(told.by_path["alone"].outputs[0], (8,))
    assert set(told.by_path) == set(found[0].by_path)


def test_shapes_with_a_row_for_each_token():
    calls = Calls(31, {})
    assert calls.holds((31, 4, 8), (32,))
    assert calls.holds((1, 31, 32), (4, 8))
    assert calls.holds((31 * 4, 8), (4, 8)), "rows x heads"
    assert not calls.holds((31, 33), (32,))
    assert not calls.holds((32, 31), (32,)), "rows come first"
    assert not calls.holds(None, (32,))
    assert not calls.holds((1, 32), (32,)), "of the last token alone"
