"""Limits and soft caps: where they are seen, what they give, and which are named."""

import math

import pytest
import torch
from torch.nn import functional

from harness.formats.taps import Kind, Operation
from harness.judge.explain.layer.activation import clamped, soft_capped

from ..toys import ToyModel, by_cause, failure_of, random

TAP = "model.layers.1.mlp.act"


def test_gate_up_and_activation(bench):
    gate, up = (bench.tap(f"model.layers.1.mlp.{name}_proj") for name in ("gate", "up"))
    wrong = {
        "gate and up are swapped: the activation is applied to up": functional.silu(up) * gate,
        "the activation is GELU": functional.gelu(gate) * up,
        "the activation is GELU (tanh)": functional.gelu(gate, approximate="tanh") * up,
        "the activation is ReLU": functional.relu(gate) * up,
        "no activation is applied": gate * up,
        "the product with up is missing": functional.silu(gate),
        "the gate is missing": up,
        "act(gate) and up are added instead of multiplied": functional.silu(gate) + up,
        "the activation is applied to the product": functional.silu(gate * up),
        "the activation is computed in bfloat16": functional.silu(gate.bfloat16()).double() * up,
    }
    for cause, tensor in wrong.items():
        explanation = bench.explain(TAP, tensor)
        assert cause in explanation.cause
        assert explanation.is_cause
        assert explanation.scope == "every row"
        assert explanation.residual_after < 10


def test_gate_for_up_where_no_line_of_hf_has_both(bench_of):
    bench, tap = bench_of("recurrent_gemma"), "model.layers.1.mlp_block.act"
    gate, up = (bench.tap(f"model.layers.1.mlp_block.{name}_proj") for name in ("gate", "up"))
    explanation = bench.explain(tap, functional.gelu(up, approximate="tanh") * gate)
    assert explanation.cause == "gate and up are swapped: the activation is applied to up"
    assert explanation.is_cause


def test_one_request_alone(bench):
    gate, wrong = bench.tap("model.layers.1.mlp.gate_proj"), bench.tap(TAP)
    second = bench.rows(TAP).request == 1
    wrong[second] = (torch.sigmoid(gate) * bench.tap("model.layers.1.mlp.up_proj"))[second]
    explanation = bench.explain(TAP, wrong)
    assert explanation.cause.startswith("the activation is sigmoid: in Qwen3MLP (modeling_qwen3.py:")
    assert explanation.scope == "request 1"


def test_an_activation_without_a_gate(bench_of):
    """GPT-2's; nothing that is said of gate and up can hold for it."""
    bench, tap = bench_of("gpt2"), "transformer.h.1.mlp.c_proj.input"
    x = bench.tap("transformer.h.1.mlp.c_fc")
    for cause, tensor in {
        "the activation is ReLU": functional.relu(x),
        "no activation is applied": x,
    }.items():
        explanation = bench.explain(tap, tensor)
        assert explanation.cause.startswith(cause)
        assert explanation.scope == "every row"


OPERATION = Operation(tap="model.layers.0.mlp.down_proj", kind=Kind.LINEAR)
ROWS = torch.arange(-12.0, 12.0, dtype=torch.float64).view(4, 6) / 4  # -3 to 2.75


def of(actual, expected=ROWS, **config):
    return failure_of(OPERATION, actual, expected, model=ToyModel(OPERATION, **config))


@pytest.mark.parametrize(
    ("low", "high", "where", "num_fitted"),
    [
        (-1.5, 2.0, "outside of -1.5 to 2", 2),
        (-9.0, 2.25, "beyond 2.25", 1),
        (-2.5, 9.0, "beyond -2.5", 1),
    ],
)
def test_a_limit_cuts_off_what_is_beyond_it(low, high, where, num_fitted):
    actual = ROWS.clamp(low, high)
    ((cause, hypothesis),) = by_cause(clamped, of(actual)).items()
    assert cause == f"values {where} are cut off"
    assert hypothesis.num_fitted == num_fitted
    assert torch.equal(hypothesis.output, actual)


@pytest.mark.parametrize(
    "actual",
    [
        ROWS,  # nothing is cut off
        ROWS.clamp(max=2.5),  # two elements are at the limit: the largest and the one beside it
        ROWS.clamp(min=-2.75),
        torch.full_like(ROWS, 1.0),  # all of it is one number
    ],
)
def test_no_limit_where_fewer_than_three_elements_are_at_it(actual):
    assert by_cause(clamped, of(actual)) == {}


def test_a_limit_that_changes_nothing_is_none():
    expected = ROWS.clamp(max=1.0)
    assert by_cause(clamped, of(expected, expected)) == {}


def test_a_limit_leaves_other_errors_in_the_rows():
    actual = ROWS.clamp(max=2.0)
    actual[0, 3] += 0.125
    (hypothesis,) = by_cause(clamped, of(actual)).values()
    assert torch.equal(hypothesis.output, ROWS.clamp(max=2.0))


def bent(cap):
    return torch.tensor([[cap * math.tanh(x / cap) for x in row] for row in ROWS.tolist()], dtype=torch.float64)


def test_the_usual_caps_and_one_that_is_fitted():
    causes = by_cause(soft_capped, of(bent(7.25)))
    expected = dict.fromkeys((15, 20, 30, 50), 0) | {7.25: 1}
    assert set(causes) == {f"a soft cap of {cap:g} is applied, which the model does not have" for cap in expected}
    for cap, num_fitted in expected.items():
        hypothesis = causes[f"a soft cap of {cap:g} is applied, which the model does not have"]
        assert hypothesis.num_fitted == num_fitted
        torch.testing.assert_close(hypothesis.output, bent(cap), rtol=1e-12, atol=0)


@pytest.mark.parametrize("cap", [0.4, 1.0, 3.0, 40.0, 140.0])
def test_caps_are_fitted_from_strong_to_weak(cap):
    (fitted,) = (item for item in by_cause(soft_capped, of(bent(cap))).values() if item.num_fitted)
    assert fitted.cause == f"a soft cap of {cap:g} is applied, which the model does not have"


def test_the_fitted_cap_has_four_digits():
    (fitted,) = (item for item in by_cause(soft_capped, of(bent(7.123456))).values() if item.num_fitted)
    assert fitted.cause.startswith("a soft cap of 7.123 ")
    torch.testing.assert_close(fitted.output, bent(7.123), rtol=1e-12, atol=0)


@pytest.mark.parametrize("actual", [ROWS, 1.1 * ROWS, bent(160.0), torch.zeros_like(ROWS) + 9 * ROWS.sign()])
def test_no_cap_is_fitted_where_elements_are_as_large_or_larger_or_hardly_smaller(actual):
    """The largest element is 3: a cap of more than 150 bends nothing that could be measured."""
    assert not [item for item in by_cause(soft_capped, of(actual)).values() if item.num_fitted]


def test_the_fit_takes_noise():
    actual = bent(5.0) + 1e-4 * random(4, 6)
    (fitted,) = (item for item in by_cause(soft_capped, of(actual)).values() if item.num_fitted)
    torch.testing.assert_close(fitted.output, bent(5.0), rtol=1e-3, atol=1e-3)


def test_a_cap_of_the_models_own_that_is_left_out():
    failure = of(ROWS, bent(6.0), final_logit_softcapping=6.0, softcap_off=None, num_caps=0, capacity=-1.0, width=8)
    (hypothesis,) = (item for cause, item in by_cause(soft_capped, failure).items() if "left out" in cause)
    assert hypothesis.cause == "the soft cap of 6 is left out"
    assert hypothesis.num_fitted == 0
    torch.testing.assert_close(hypothesis.output, ROWS, rtol=1e-9, atol=1e-12)


def test_what_a_cap_cannot_give_was_not_capped():
    """An element of the cap's own size would have been infinite."""
    failure = of(ROWS, ROWS, final_logit_softcapping=3.0)
    assert not [cause for cause in by_cause(soft_capped, failure) if "left out" in cause]
    failure = of(ROWS, ROWS, final_logit_softcapping=3.01)
    assert [cause for cause in by_cause(soft_capped, failure) if "left out" in cause] == [
        "the soft cap of 3.01 is left out"
    ]


def test_a_cap_of_the_models_own_that_is_another():
    causes = by_cause(soft_capped, of(bent(5.0), bent(3.5), final_logit_softcapping=3.5))
    hypothesis = causes["the soft cap is 5 instead of 3.5"]
    assert hypothesis.num_fitted == 1
    torch.testing.assert_close(hypothesis.output, bent(5.0), rtol=1e-9, atol=0)
