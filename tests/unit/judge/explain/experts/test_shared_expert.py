"""Routed and shared experts added otherwise: each cause as coefficients of both parts, row by row."""

import pytest
import torch

from harness.formats.taps import Kind, Operation
from harness.judge.explain.experts.experts import other_sum

from ..toys import by_cause, failure_of, outputs, random

OPERATION = Operation(tap="model.layers.0.mlp", kind=Kind.OTHER, inputs=("r", "s", "g"))
ROUTED, SHARED = random(3, 5, seed=1), random(3, 5, seed=2)
SHARE = torch.tensor([[0.25], [0.5], [0.8]], dtype=torch.float64)
GATE = SHARE.logit()
RIGHT = ROUTED + SHARE * SHARED
S, ONE, NONE = SHARE, torch.ones_like(SHARE), torch.zeros_like(SHARE)
CAUSES = {
    "the shared expert is not added": (ONE, NONE),
    "the routed experts are not added": (NONE, S),
    "the shared expert is added without its gate": (ONE, ONE),
    "the gate of the shared expert is used without a sigmoid": (ONE, GATE),
    "the gate of the shared expert is applied to the routed experts instead": (S, ONE),
    "the gate of the shared expert is applied to the routed experts, too": (S, S),
    "the shared expert is added twice": (ONE, 2 * S),
    "the shared expert is subtracted": (ONE, -S),
}


def of(actual, inputs=(ROUTED, SHARED, GATE), expected=RIGHT):
    return failure_of(OPERATION, actual, expected, *inputs)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_each_cause_is_a_sum_with_other_coefficients(order):
    inputs = [(ROUTED, SHARED, GATE)[at] for at in order]
    actual = outputs(other_sum, of(RIGHT, inputs))
    assert {cause for cause in actual if "scaled" not in cause} == set(CAUSES)
    for cause, (routed, shared) in CAUSES.items():
        torch.testing.assert_close(actual[cause], routed * ROUTED + shared * SHARED, msg=cause)


@pytest.mark.parametrize(("what", "part"), [("shared expert", SHARE * SHARED), ("routed experts", ROUTED)])
@pytest.mark.parametrize(
    ("factor", "is_said"),
    [
        (0.5, True),
        (-0.5, True),
        (3.0, True),
        (0.011, True),
        (0.009, False),
        (2.011, True),
        (1.991, False),
        (-1.009, False),
    ],
)
def test_a_factor_is_said_unless_it_has_a_name(what, part, factor, is_said):
    actual = RIGHT + (factor - 1) * part
    scaled = {c: h for c, h in by_cause(other_sum, of(actual)).items() if f"the {what} is scaled" in c}
    assert set(scaled) == ({f"the output of the {what} is scaled by {factor:.4g}"} if is_said else set())
    for hypothesis in scaled.values():
        assert hypothesis.num_fitted == 1
        torch.testing.assert_close(hypothesis.output, actual)


@pytest.mark.parametrize(
    "inputs",
    [
        (ROUTED, SHARED),
        (ROUTED, SHARED, GATE, GATE),
        (ROUTED, SHARED, ROUTED, GATE),
        (ROUTED, SHARED, GATE + 0.01),
        (ROUTED[:, :1], SHARED[:, :1], GATE),
    ],
)
def test_nothing_is_said_of_another_sum(inputs):
    width = inputs[0].shape[1]
    assert by_cause(other_sum, of(RIGHT[:, :width] * 2, inputs, RIGHT[:, :width])) == {}


def test_a_sum_of_single_elements_is_another():
    one = torch.ones(3, 1, dtype=torch.float64)
    assert by_cause(other_sum, of(one, (one, one, one), one + one.sigmoid())) == {}


def test_the_sum_is_the_models_up_to_rounding():
    near = RIGHT * (1 + 0.9e-5)
    assert by_cause(other_sum, of(near, expected=near))
    far = RIGHT * (1 + 1.1e-5)
    assert by_cause(other_sum, of(far, expected=far)) == {}
    one_row = torch.cat((RIGHT[:2], 1.1 * RIGHT[2:]))
    assert by_cause(other_sum, of(one_row, expected=one_row)) == {}
