"""Layers that did not run, told by the operation after them."""

import pytest
import torch

from harness.judge.compare.align import Rows
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.explain.run import layers_that_did_not_run
from harness.oracle.precision import upcast

TAP, BEFORE, BEHIND = "model.layers.2.input_layernorm", "model.layers.0.output", "model.layers.1."


class Without:
    """A locator of a recording that has nothing of layer 1, and another tensor of one tap."""

    def __init__(self, bench, tensor):
        self.recording = bench.recording
        self.tensors = {TAP: tensor, BEFORE: bench.tap(BEFORE)}

    def taps(self):
        return [tap.name for tap in self.recording.manifest.taps if not tap.name.startswith(BEHIND)]

    def find(self, tap, rows):
        at = torch.arange(len(rows))
        return torch.stack((rows.step, at, at), dim=1)

    def gather(self, tap, places):
        return self.tensors[tap][places[:, 2]]


def explained(bench, tensor):
    rows = Rows.concat([bench.rows(TAP)])
    unrecorded = tuple(op.tap for op in bench.hf.graph.of_layer(1))
    errors = LocalErrors(
        rows=rows, roundings=torch.full((len(rows),), 1e6, dtype=torch.float64),
        bound=torch.full((len(rows),), 20.0, dtype=torch.float64), unrecorded=unrecorded,
    )  # fmt: skip
    operation = bench.hf.graph[TAP]
    with torch.no_grad(), upcast(torch.float64, bench.hf.module(operation.module)):
        return layers_that_did_not_run(operation, errors, bench.hf, Without(bench, tensor), bench.dtype, "every row")


def test_a_layer_that_did_not_run(bench):
    x = bench.tap(BEFORE)
    explanation = explained(bench, x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * bench.weight(TAP))
    assert explanation.cause == f"layer 1 did not run: no tap of layer 1 was seen, and this fits {BEFORE}"
    assert explanation.is_cause
    assert explanation.num_explained == explanation.num_rows


def test_a_layer_that_was_only_not_recorded(bench):
    explanation = explained(bench, bench.tap(TAP) * 1.5)
    assert explanation.cause == "no tap of layer 1 was seen"
    assert not explanation.is_cause


@pytest.mark.parametrize("tap", ["model.layers.0.input_layernorm", "model.norm"])
def test_elsewhere_nothing_is_said(bench, tap):
    rows = bench.rows(TAP)
    ones = torch.ones(len(rows), dtype=torch.float64)
    errors = LocalErrors(rows=rows, roundings=ones, bound=ones)
    operation = bench.hf.graph[tap]
    without = Without(bench, bench.tap(TAP))
    assert layers_that_did_not_run(operation, errors, bench.hf, without, bench.dtype, "") is None
