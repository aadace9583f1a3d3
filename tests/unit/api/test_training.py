"""Rollouts and weights from Python."""

import pytest
import torch

import harness
from harness.oracle.model import load_model

ROWS = [{"prompt_ids": [1, 20, 31, 7, 9], "response_ids": [40, 41, 42], "engine_logprobs": [-4.0, -5.0, -6.0]}]


@pytest.fixture(scope="module")
def trainer():
    return load_model("cases/checkpoints/llama-tiny", dtype=torch.float32, stays=True).model


def column(module, row):
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
    with torch.no_grad():
        logprobs = module(input_ids=ids).logits[0].log_softmax(dim=-1)
    begin = len(row["prompt_ids"])
    return [float(logprobs[at - 1, ids[0, at]]) for at in range(begin, ids.shape[1])]


def test_rows_in_memory_and_a_module(trainer):
    rows = [{**row, "engine_logprobs": column(trainer, row)} for row in ROWS]
    report = harness.rollout(rows, model="llama-tiny", trainer=trainer, dtype="float32")
    assert report
    assert repr(report) == "<RolloutReport pass: rollouts, 3 tokens>"
    assert str(report).startswith("PASS  rollouts")
    assert report.as_dict()["verdict"] == "pass"


def test_a_module_of_any_kind_is_judged_by_its_logits(trainer):
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trainer

        def forward(self, ids):
            return self.inner(input_ids=ids).logits

    rows = [{**row, "engine_logprobs": column(trainer, row)} for row in ROWS]
    report = harness.rollout(rows, model="llama-tiny", trainer=Wrapped(), dtype="float32")
    assert report
    assert report.sides[0].source == "Wrapped"


def test_a_gap_can_be_asserted():
    report = harness.rollout(ROWS, model="llama-tiny", dtype="float32")
    assert not report
    with pytest.raises(harness.GapError, match="no known cause fits the rest"):
        report.assert_ok()


def test_a_trainer_that_raises_is_named():
    class Raising(torch.nn.Module):
        def forward(self, ids):
            raise ValueError("no such thing")

    with pytest.raises(harness.HarnessError, match="trainer Raising") as caught:
        harness.rollout(ROWS, model="llama-tiny", trainer=Raising(), dtype="float32")
    assert caught.value.code == "H017"


def test_bad_arguments_are_named():
    with pytest.raises(harness.HarnessError, match="layout=") as caught:
        harness.rollout(ROWS, model="llama-tiny", layout="top")
    assert caught.value.code == "H013"


def test_weights_of_a_module(trainer):
    result = harness.weights("llama-tiny", trainer)
    assert result.outcome == "pass"
    assert result.only_second == ()
