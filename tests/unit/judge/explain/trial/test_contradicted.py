"""Causes that some wrong rows would bear out, and other rows contradict, are not asserted."""

import pytest
import torch

pytest.importorskip("harness.extensions.faults", reason="the catalogue of faults is an extension")
from harness.extensions.faults.fault import Category, Fault, FaultConfig
from harness.extensions.faults.reference.experts import mixed, routed, sum_of
from tests.fault_trial import try_entry


def too_high_in_most_rows(self, logits):
    """In every fourth row the last expert is chosen twice, in the others the numbers are one too high."""
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
    chosen = (chosen + 1) % logits.shape[1]
    chosen[::4] = logits.shape[1] - 1
    return weights / weights.sum(-1, keepdim=True), chosen


def full(self, x, weights, chosen):
    """An expert takes four tokens of a step: the others lack it, and these do not."""
    place = torch.zeros_like(chosen)
    for number in chosen.unique().tolist():
        taken = (chosen == number).flatten().cumsum(0).view_as(chosen)
        place = torch.where(chosen == number, taken, place)
    return sum_of(self, x, weights.masked_fill(place > 4, 0), chosen)


@pytest.mark.parametrize(
    ("inject", "tap"),
    [
        (routed(too_high_in_most_rows), "model.layers.0.mlp.gate.topk"),
        (mixed(full), "model.layers.0.mlp.experts"),
    ],
    ids=["numbers-one-too-high", "output-not-added"],
)
def test_what_other_rows_contradict_is_no_cause(inject, tap):
    setting = FaultConfig(model="qwen3-moe-tiny", schedule="mixed:8")
    fault = Fault(
        id=".", category=Category.EXPERTS, summary=".", inject=inject, tap=tap, row=None, cause=".", setting=setting
    )
    (run,) = try_entry(fault).result.runs
    assert run.first_divergence.tap == tap
    assert not run.first_divergence.explanation.is_cause, run.first_divergence.explanation
