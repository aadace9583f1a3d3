"""A step begins with the model's forward, whoever calls it, and ends with the sampler."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.engines.torch_modules import Entry, ForwardBatch, StepWatcher
from harness.formats.recording import RequestInfo


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()

    def forward(self, input_ids, positions):
        return self.norm(input_ids[:, None].float())


class PastAllHooks(Model):
    """As a model that vLLM could compile as a whole."""

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class Watcher(StepWatcher):
    def read_batch(self, arguments):
        positions = arguments["positions"].tolist()
        return ForwardBatch(
            requests=[0], starts=[0, len(positions)], positions=positions, num_padded_rows=len(arguments["input_ids"]),
            slot_mapping=None,
        )  # fmt: skip

    def sampled_tokens(self, output):
        return output


def recorded(model):
    steps, taps = [], []
    writer = SimpleNamespace(
        begin_step=lambda **step: steps.append(step["position"]),
        tap=lambda name, tensor: taps.append((name, tuple(tensor.shape))),
        end_step=lambda sampled: steps.append(sampled),
    )
    sampler, request = nn.Identity(), RequestInfo(id=0, prompt_length=3, token_ids=[5, 6, 7])
    table = [Entry(module="norm", output="model.norm")]
    with Watcher(model, sampler, table, [request], writer):
        model(torch.tensor([5, 6, 7]), positions=torch.arange(3))
        sampler(torch.tensor([9]))
    return steps, taps


@pytest.mark.parametrize("kind", [Model, PastAllHooks])
def test_a_step_begins_with_the_forward(kind):
    model = kind()
    assert recorded(model) == ([[0, 1, 2], [9]], [("model.norm", (3, 1))])
    assert "forward" not in vars(model)
    assert not model.norm._forward_hooks
