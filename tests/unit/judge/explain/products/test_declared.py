"""A wrong product of inputs that the engine is known to round: the failure is looked at under each rounding."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.explain.products import linear as declared
from harness.judge.explain.products.linear import declared_failures

from ..toys import ToyModel, failure_of, linear, random

TAP = "model.layers.0.up"
X, WEIGHT, BIAS = random(3, 32, seed=1), random(4, 32, seed=2), random(4, seed=3)


def of(*, kind=Kind.LINEAR, numerics=("Q8_0",), dtype=torch.float32, bias=True, adapter=False):
    operation = Operation(tap=TAP, kind=kind, source=TAP)
    module = linear(WEIGHT, BIAS if bias else None)
    if adapter:
        module.lora_a = nn.Parameter(random(2, 32))
    expected = X @ WEIGHT.T + (BIAS if bias else 0) + adapter
    manifest = SimpleNamespace(numerics=numerics and Numerics(weights=numerics))
    model = ToyModel(operation, modules={TAP: module})
    failure = failure_of(operation, expected + 1, expected, X, model=model, dtype=dtype)
    return type(failure)(**{**vars(failure), "recording": SimpleNamespace(manifest=manifest)})


@pytest.fixture
def coarse(monkeypatch):
    """Two ways of rounding the inputs, by what is asked for."""
    asked = []

    def rounded(x, weights):
        asked.append(weights)
        return [x + 1]

    def quantised(x, weights):
        asked.append(weights)
        return [x + 2]

    monkeypatch.setattr(declared, "rounded_inputs", rounded)
    monkeypatch.setattr(declared, "quantised_inputs", quantised)
    return asked


@pytest.mark.parametrize("bias", [True, False])
def test_a_product_is_computed_of_each(coarse, bias):
    hypotheses = list(declared_failures(of(bias=bias)))
    assert coarse == [("Q8_0",), ("Q8_0",)]
    for item, x in zip(hypotheses, (X + 1, X + 2), strict=True):
        assert torch.equal(item.inputs[0], x)
        torch.testing.assert_close(item.expected, x @ WEIGHT.T + (BIAS if bias else 0))
        assert torch.equal(item.actual, of(bias=bias).actual)


def test_an_adapters_own_products_take_the_inputs_as_they_are(coarse):
    failure = of(kind=Kind.OTHER, adapter=True)
    for item, shift in zip(declared_failures(failure), (1, 2), strict=True):
        assert torch.equal(item.inputs[0], X)
        torch.testing.assert_close(item.expected, failure.expected + shift * WEIGHT.sum(dim=1))


@pytest.mark.parametrize(
    "others", [{"kind": Kind.OTHER}, {"numerics": None}, {"numerics": ()}, {"dtype": torch.bfloat16},
               {"kind": Kind.NORM}, {"kind": Kind.NORM, "adapter": True}],
)  # fmt: skip
def test_elsewhere_nothing_is_declared(coarse, others):
    assert list(declared_failures(of(**others))) == []


def test_a_product_without_a_weight_has_none(coarse):
    failure = of()
    failure.hf.modules[TAP] = nn.Identity()
    assert list(declared_failures(failure)) == []
