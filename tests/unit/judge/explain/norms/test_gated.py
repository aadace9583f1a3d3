"""Gates of norms, against Mamba 2's and Qwen 3 Next's own modules."""

import pytest
import torch
from torch.nn.functional import silu
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from harness.formats.taps import Kind, Operation
from harness.judge.explain.norms import other_gate

from ..toys import ToyModel, failure_of, found, random

X, PRODUCT, WIDTH = random(5, 8, seed=1), random(5, 20, seed=2), 8
TAP = "model.layers.0.mixer.norm"
LEFT_OUT, PLAIN = "the gate of the norm is left out", "the gate of the norm is not activated"


def given(module, actual=None, gate=PRODUCT[:, :WIDTH]):
    module.weight.data = 1 + 0.3 * random(len(module.weight), seed=3)
    shape = (len(X), -1, len(module.weight))
    with torch.no_grad():
        expected = module(X.view(shape), gate.reshape(shape)).flatten(1).double()
    operation = Operation(tap=TAP, kind=Kind.OTHER, inputs=("x", "in_proj"), source=TAP)
    model = ToyModel(operation, modules={TAP: module})
    return found(other_gate, failure_of(operation, expected, expected, X, PRODUCT, model=model)), module.weight.data


def normed(x, weight, size):
    """Normalise groups one by one."""
    groups = [x[:, at : at + size] for at in range(0, WIDTH, size)]
    rows = torch.cat([group / (group.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() for group in groups], dim=1)
    return rows * weight.repeat(WIDTH // len(weight))


@pytest.mark.parametrize("size", [8, 4])
@pytest.mark.parametrize("gate", [PRODUCT[:, :WIDTH], PRODUCT[:, -WIDTH:]], ids=["first", "last"])
def test_a_gate_before_the_norm(size, gate):
    causes, weight = given(MambaRMSNormGated(WIDTH, group_size=size, eps=1e-6), gate=gate)
    after = "the gate is multiplied after the norm instead of before"
    expected = {
        LEFT_OUT: normed(X, weight, size), PLAIN: normed(X * gate, weight, size),
        after: normed(X, weight, size) * silu(gate),
    }  # fmt: skip
    assert set(causes) == set(expected)
    for cause, output in expected.items():
        torch.testing.assert_close(causes[cause].output, output, msg=cause)


def test_a_gate_after_the_norm():
    causes, weight = given(Qwen3NextRMSNormGated(4, eps=1e-6))
    gate = PRODUCT[:, :WIDTH]
    assert set(causes) == {LEFT_OUT, PLAIN, "the gate is multiplied before the norm, not after"}
    torch.testing.assert_close(causes[PLAIN].output, normed(X, weight, 4) * gate)


def test_a_norm_of_another_form_is_left_alone():
    assert given(MambaRMSNormGated(WIDTH, group_size=8), gate=PRODUCT[:, 5:13])[0] == {}
