"""Adapters: W x + s B (A x), each cause against sums that are written out."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.products import lora

from ..toys import ToyModel, by_cause, failure_of, outputs, random

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
SWAPPED = "A and B of the adapter are swapped, or their product is transposed"
ORDER = "the rows of the adapter's B are in another order"


def of(actual=RIGHT, module=None, expected=RIGHT, rows=4):
    model = ToyModel(OPERATION, modules={TAP: module or Adapted()})
    return failure_of(OPERATION, actual[:rows], expected[:rows], X[:rows], model=model)


def test_what_is_done_to_the_update():
    swapped = torch.tensor([[SCALE * sum(float(x[i] * B[i, r] * A[r, o]) for i in range(WIDTH) for r in range(RANK))
                             for o in range(WIDTH)] for x in X], dtype=torch.float64)  # fmt: skip
    expected = {
        "the adapter is not applied": (BASE, 0),
        "the adapter is applied twice": (BASE + 2 * update(), 0),
        "the adapter's scale is alpha, not divided by the rank": (BASE + RANK * update(), 0),
        "the adapter's scale is alpha / sqrt(rank)": (BASE + math.sqrt(RANK) * update(), 0),
        "the adapter's scale is 0.7 times what it should be": (BASE + 0.7 * update(), 1),
        SWAPPED: (BASE + swapped, 0),
    }
    hypotheses = by_cause(lora.wrong_adapter, of(BASE + 0.7 * update()))
    assert set(hypotheses) - {ORDER} == set(expected)
    for cause, (output, num_fitted) in expected.items():
        torch.testing.assert_close(hypotheses[cause].output, output)
        assert hypotheses[cause].num_fitted == num_fitted


@pytest.mark.parametrize("named", [0.0, 2.0, RANK, math.sqrt(RANK)])
@pytest.mark.parametrize(("offset", "is_fitted"), [(0.009, False), (-0.009, False), (0.011, True), (-0.011, True)])
def test_a_scale_that_has_a_name_is_not_fitted(named, offset, is_fitted):
    hypotheses = outputs(lora.wrong_adapter, of(BASE + (named + offset) * update()))
    assert any("times what it should be" in cause for cause in hypotheses) == is_fitted


def test_an_adapter_of_zeros_has_no_scale():
    causes = by_cause(lora.wrong_adapter, of(module=Adapted(b=torch.zeros_like(B)), expected=BASE))
    assert not any("scale" in cause for cause in causes)


def test_a_layer_that_is_not_square_has_no_transpose():
    wide = random(WIDTH + 1, RANK, seed=5)
    right = torch.cat((BASE, BASE[:, :1]), dim=1) + update(b=wide)
    assert SWAPPED not in by_cause(lora.wrong_adapter, of(right, Adapted(b=wide), right))


def test_another_adapter_of_those_that_are_served():
    a, b = random(2, WIDTH, seed=6), random(WIDTH, 2, seed=7)
    others = {"poet": SimpleNamespace(a=a.float(), b=b.float(), scaling=4.0)}
    theirs = update(a.float().double(), b.float().double(), 4.0)
    hypotheses = by_cause(lora.wrong_adapter, of(module=Adapted(others=others)))
    torch.testing.assert_close(hypotheses["the adapter is another one: poet"].output, BASE + theirs)


def test_rows_of_b_in_another_order():
    wrong = BASE + update(b=B[[1, 0, 4, 3, 2]])
    torch.testing.assert_close(by_cause(lora.wrong_adapter, of(wrong))[ORDER].output, wrong)
    assert ORDER not in by_cause(lora.wrong_adapter, of())
    assert ORDER in by_cause(lora.wrong_adapter, of(wrong, rows=2))
    assert ORDER not in by_cause(lora.wrong_adapter, of(wrong, rows=1)), "one row tells no outputs apart"


def test_too_many_outputs_are_not_matched(monkeypatch):
    wrong = BASE + update(b=B[[1, 0, 4, 3, 2]])
    for most, is_matched in ((WIDTH, True), (WIDTH - 1, False)):
        monkeypatch.setattr(lora, "_MAX_MATCHED", most)
        assert (ORDER in by_cause(lora.wrong_adapter, of(wrong))) == is_matched


def test_a_product_without_an_adapter_is_left_alone():
    assert by_cause(lora.wrong_adapter, of(module=nn.Linear(WIDTH, WIDTH))) == {}
