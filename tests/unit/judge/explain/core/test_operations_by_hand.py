"""Which operations are computed by themselves, and of which inputs."""

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.core.operations import activation_of, factors_of, replay

from ..toys import ToyModel, linear, random

A, B = random(3, 4, seed=1), random(3, 4, seed=2)


class Block(nn.Module):
    def __init__(self, name, function):
        super().__init__()
        setattr(self, name, function)


def of(kind, *inputs, module=None, shape=(), source="mlp.down:input", parent=None):
    operation = Operation(tap="t", kind=kind, inputs=tuple(map(str, range(len(inputs)))), source=source, shape=shape)
    path = operation.module
    model = ToyModel(operation, modules={path: module or nn.Identity(), "mlp": parent or nn.Module(), "": nn.Module()})
    with torch.no_grad():
        return replay(model, operation, list(inputs))


def test_a_sum_is_that_of_two_of_one_shape():
    assert torch.equal(of(Kind.ADD, A, B), A + B)
    assert of(Kind.ADD, A) is None
    assert of(Kind.ADD, A, B, B) is None
    assert of(Kind.ADD, A, B[:, :3]) is None
    assert of(Kind.OTHER, A, B) is None
    assert torch.equal(of(Kind.ADD, A.view(3, 2, 2), B), A + B)


@pytest.mark.parametrize("name", ["act_fn", "activation_fn", "act"])
def test_an_activation_stands_beside_the_module_that_reads_it(name):
    parent = Block(name, nn.ReLU())
    assert torch.equal(of(Kind.ACTIVATION, A, B, parent=parent), A.relu() * B)
    assert torch.equal(of(Kind.ACTIVATION, A, parent=parent, shape=(4,)), A.relu())
    both = torch.cat((A, B), dim=1)
    assert torch.equal(of(Kind.ACTIVATION, both, parent=parent, shape=(4,)), A.relu() * B)
    assert torch.equal(of(Kind.ACTIVATION, both, parent=parent, shape=(2, 2)), A.relu() * B)
    assert of(Kind.ACTIVATION, A, B) is None


def test_the_first_of_several_activations_is_used():
    parent = Block("act", nn.ReLU())
    parent.act_fn = nn.Tanh()
    operation = Operation(tap="t", kind=Kind.ACTIVATION, source="mlp.down:input")
    assert activation_of(ToyModel(operation, modules={"mlp": parent}), operation) is parent.act_fn


def test_gate_and_up_may_come_as_one():
    operation = Operation(tap="t", kind=Kind.ACTIVATION, shape=(2,))
    gate, up = factors_of(operation, [A])
    assert torch.equal(gate, A[:, :2])
    assert torch.equal(up, A[:, 2:])
    gate, up = factors_of(operation, [A[:, :3]])
    assert (gate.shape, up) == ((3, 3), None)
    assert factors_of(operation, [A, B]) == (A, B)


@pytest.mark.parametrize("bias", [None, random(5, seed=4)])
def test_a_product_of_a_router_is_taken_with_its_weight_alone(bias):
    class Router(nn.Linear):
        def forward(self, x):
            raise AssertionError("a router does more than its product")

    weight = random(5, 4, seed=3)
    module = Router(4, 5, bias=bias is not None)
    module.weight.data = weight.float()
    if bias is not None:
        module.bias.data = bias.float()
    given = of(Kind.LINEAR, A, module=module, source="mlp.gate:linear")
    expected = A @ weight.float().double().T + (0 if bias is None else bias.float().double())
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(of(Kind.LINEAR, A, module=linear(weight)), A @ weight.T)
    assert of(Kind.LINEAR, A, module=nn.Identity()) is None


def test_a_norm_of_heads_sees_heads():
    norm = nn.RMSNorm(2, eps=1e-6, dtype=torch.float64)
    norm.weight.data = torch.tensor([2.0, 3.0], dtype=torch.float64)
    heads = [
        [v * w for v, w in zip(pair, (2.0, 3.0), strict=True)] for row in A.tolist() for pair in (row[:2], row[2:])
    ]
    sizes = [((pair[0] ** 2 + pair[1] ** 2) / 2 + 1e-6) ** 0.5 for row in A.tolist() for pair in (row[:2], row[2:])]
    expected = (
        torch.tensor([[v / size for v in pair] for pair, size in zip(heads, sizes, strict=True)]).double().view(3, 4)
    )
    torch.testing.assert_close(of(Kind.NORM, A, module=norm), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(of(Kind.NORM, A[:, :2], module=norm), expected[:, :2], rtol=1e-6, atol=1e-7)
    wide = nn.RMSNorm(4, eps=1e-6, dtype=torch.float64)
    torch.testing.assert_close(of(Kind.NORM, A, module=wide), wide(A).detach())
