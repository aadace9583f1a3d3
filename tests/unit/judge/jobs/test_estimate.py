"""What an estimate takes for the time of the layers, by a clock that only they move."""

import pytest
import torch

from harness.formats.case import RequestSpec
from harness.judge.jobs import estimate as subject
from harness.oracle.model import load_model
from harness.plan import plan_request

NUM_LAYERS = 3


@pytest.fixture
def layers_alone_take_time(monkeypatch):
    """Let each run of a decoder layer take a second, and all else no time; return how to watch a model."""
    seconds = [0.0]
    monkeypatch.setattr(subject, "_clock", lambda: seconds[0])

    def watch(hf):
        def tick(*_):
            seconds[0] += 1

        for path in hf.parts:
            if path.rpartition(".")[2].isdecimal():
                hf.module(f"{path}.mlp").register_forward_hook(tick)
        return hf

    return watch


def test_layers_are_told_from_other_parts_in_whichever_order_they_stand(
    checkpoints, monkeypatch, layers_alone_take_time
):
    """HF's rotary embedding is made after the layers, and runs before them. A sound comparison needs no control."""
    folder = checkpoints / "qwen3-tiny"
    hf = layers_alone_take_time(load_model(folder, dtype=torch.float32))
    monkeypatch.setattr(subject, "planned_model", lambda _plan: hf)
    plan = plan_request(
        model=str(folder),
        engine="hf",
        dtype="float32",
        requests=[RequestSpec(token_ids=[5, 6, 7])],
        max_new_tokens=1,
    )
    phases = {phase.name: phase.seconds for phase in subject.run_estimate(plan).phases}
    num_forwards = {"graph of the model": 2, "continuation": 1, "comparison, 1 times": 1}
    assert phases == {"loading": 0.0} | {name: num * NUM_LAYERS for name, num in num_forwards.items()}
