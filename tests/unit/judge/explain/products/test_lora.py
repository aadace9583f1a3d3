"""Adapters: W x + s B (A x), each cause against sums that are written out."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.causes import EXPLANATIONS
from harness.judge.explain.products import lora

from ..toys import ToyModel, assert_outputs, by_cause, failure_of, outputs, random

TAP = "model.layers.0.self_attn.q_proj"
OPERATION = Operation(tap=TAP, kind=Kind.OTHER, source=TAP)
RANK, WIDTH, SCALE = 3, 5, 0.5
X, WEIGHT = random(4, WIDTH, seed=1), random(WIDTH, WIDTH, seed=2)
A, B = random(RANK, WIDTH, seed=3), random(WIDTH, RANK, seed=4)


class Adapted(nn.Module):
    def __init__(self, a=A, b=B, others=None):
        super().__init__()
        self.lora_a, self.lora_b = nn.Parameter(a), nn.Parameter(b)
        self.scaling, self.others = SCALE, others or {}


def update(a=A, b=B, scale=SCALE, x=X):
    """s B (A x), a row and an output at a time."""
    rows = [
        [scale * sum(float(b[o, r]) * float(a[r] @ row) for r in range(len(a))) for o in range(len(b))] for row in x
    ]
    return torch.tensor(rows, dtype=torch.float64)


BASE = X @ WEIGHT.T
RIGHT = BASE + update()


def of(actual=RIGHT, module=None, expected=RIGHT, rows=4):
    model = ToyModel(OPERATION, modules={TAP: module or Adapted()})
    return failure_of(OPERATION, actual[:rows], expected[:rows], X[:rows], model=model)


def test_left_out_or_twice():
    expected = {"the adapter is not applied": BASE, "the adapter is applied twice": BASE + 2 * update()}
    assert_outputs(lora.adapter_left_out, of(), expected)


def test_scales():
    hypotheses = by_cause(lora.adapter_scaled, of(BASE + 0.7 * update()))
    expected = {
        "the adapter's scale is alpha, not divided by the rank": (RANK, 0),
        "the adapter's scale is alpha / sqrt(rank)": (math.sqrt(RANK), 0),
        "the adapter's scale is 0.7 times what it should be": (0.7, 1),
    }
    assert set(hypotheses) == set(expected)
    for cause, (factor, num_fitted) in expected.items():
        torch.testing.assert_close(hypotheses[cause].output, BASE + factor * update())
        assert hypotheses[cause].num_fitted == num_fitted


@pytest.mark.parametrize("named", [0.0, 2.0, RANK, math.sqrt(RANK)])
@pytest.mark.parametrize(("offset", "is_fitted"), [(0.009, False), (-0.009, False), (0.011, True), (-0.011, True)])
def test_a_scale_that_has_a_name_is_not_fitted(named, offset, is_fitted):
    hypotheses = outputs(lora.adapter_scaled, of(BASE + (named + offset) * update()))
    assert any("times what it should be" in cause for cause in hypotheses) == is_fitted


def test_an_adapter_of_zeros_has_no_scale():
    assert by_cause(lora.adapter_scaled, of(module=Adapted(b=torch.zeros_like(B)), expected=BASE)) == {}


def test_the_transpose():
    swapped = torch.tensor([[SCALE * sum(float(x[i] * B[i, r] * A[r, o]) for i in range(WIDTH) for r in range(RANK))
                             for o in range(WIDTH)] for x in X], dtype=torch.float64)  # fmt: skip
    cause = "A and B of the adapter are swapped, or their product is transposed"
    assert_outputs(lora.adapter_transposed, of(), {cause: BASE + swapped})


def test_a_layer_that_is_not_square_has_no_transpose():
    wide = random(WIDTH + 1, RANK, seed=5)
    right = torch.cat((BASE, BASE[:, :1]), dim=1) + update(b=wide)
    assert by_cause(lora.adapter_transposed, of(right, Adapted(b=wide), right)) == {}


def test_another_adapter_of_those_that_are_served():
    a, b = random(2, WIDTH, seed=6), random(WIDTH, 2, seed=7)
    others = {"poet": SimpleNamespace(a=a.float(), b=b.float(), scaling=4.0)}
    theirs = update(a.float().double(), b.float().double(), 4.0)
    expected = {"the adapter is another one: poet": BASE + theirs}
    assert_outputs(lora.adapter_of_another, of(module=Adapted(others=others)), expected)


def test_rows_of_b_in_another_order():
    order = [1, 0, 4, 3, 2]
    wrong = BASE + update(b=B[order])
    cause = "the rows of the adapter's B are in another order"
    assert_outputs(lora.outputs_of_adapter_in_another_order, of(wrong), {cause: wrong})
    assert by_cause(lora.outputs_of_adapter_in_another_order, of()) == {}
    assert by_cause(lora.outputs_of_adapter_in_another_order, of(wrong, rows=2))
    assert by_cause(lora.outputs_of_adapter_in_another_order, of(wrong, rows=1)) == {}, "one row tells no outputs apart"


def test_too_many_outputs_are_not_matched(monkeypatch):
    wrong = BASE + update(b=B[[1, 0, 4, 3, 2]])
    for most, is_matched in ((WIDTH, True), (WIDTH - 1, False)):
        monkeypatch.setattr(lora, "_MAX_MATCHED", most)
        assert bool(by_cause(lora.outputs_of_adapter_in_another_order, of(wrong))) == is_matched


@pytest.mark.parametrize("explain", EXPLANATIONS[Kind.OTHER][:5])
def test_a_product_without_an_adapter_is_left_alone(explain):
    assert by_cause(explain, of(module=nn.Linear(WIDTH, WIDTH))) == {}
