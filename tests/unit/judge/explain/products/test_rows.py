"""Rows of a product's weight that are zero, negated or scaled: the outputs that are, and how they are named."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.explain.products.rows import rows_of_the_weight, scales_of_blocks

from ..toys import ToyModel, by_cause, failure_of, linear, random

TAP = "model.layers.0.mlp.up_proj"
OPERATION = Operation(tap=TAP, kind=Kind.LINEAR, source=TAP)
X, WEIGHT, BIAS = random(6, 8, seed=1), random(12, 8, seed=2), random(12, seed=3)
ZERO = "some outputs are zero{}: these rows of the weight were not loaded"
NEGATED = "some outputs have the other sign{}: these rows of the weight are negated"
SCALED = "each output is scaled by a factor of its own{}: the scales of the weight's rows are others"
BUT = ", but for the bias"


def causes(factors, *, bias=None, bias_too=True, dtype=torch.float32, noise=0.0):
    """Return what is said of rows of the weight that are multiplied by `factors`, by output."""
    expected = X @ WEIGHT.T + (0 if bias is None else bias)
    actual = expected.clone()
    for output, factor in factors.items():
        for row in range(len(X)):
            product = sum(float(X[row, i] * WEIGHT[output, i]) for i in range(8))
            right = 0.0 if bias is None else float(bias[output])
            actual[row, output] = factor * (product + right) if bias_too else factor * product + right
    actual += noise * random(*actual.shape, seed=9)
    model = ToyModel(OPERATION, modules={TAP: linear(WEIGHT, bias)})
    failure = failure_of(OPERATION, actual, expected, X, model=model, dtype=dtype)
    return actual, by_cause(rows_of_the_weight, failure)


@pytest.mark.parametrize(("factor", "cause"), [(0.0, ZERO), (-1.0, NEGATED)])
def test_rows_that_are_zero_or_negated(factor, cause):
    actual, hypotheses = causes({2: factor, 7: factor})
    assert list(hypotheses) == [cause.format("")]
    hypothesis = hypotheses[cause.format("")]
    torch.testing.assert_close(hypothesis.output, actual)
    assert (hypothesis.num_fitted, hypothesis.detail) == (2, "outputs 2, 7: 2 of 12")


def test_many_outputs_are_listed_up_to_the_eighth():
    assert causes(dict.fromkeys(range(1, 9), 0.0))[1][ZERO.format("")].detail == (
        "outputs 1, 2, 3, 4, 5, 6, 7, 8: 8 of 12"
    )
    assert causes(dict.fromkeys(range(1, 10), 0.0))[1][ZERO.format("")].detail == (
        "outputs 1, 2, 3, 4, 5, 6, 7, 8 and others: 9 of 12"
    )


@pytest.mark.parametrize(("factor", "is_zero"), [(0.019, True), (0.021, False), (-0.019, True)])
def test_a_factor_near_zero_is_zero(factor, is_zero):
    _, hypotheses = causes({4: factor})
    assert (ZERO.format("") in hypotheses) == is_zero
    assert (SCALED.format("") in hypotheses) == (not is_zero)


def test_factors_of_each_row():
    actual, hypotheses = causes({1: 0.5, 3: 3.0, 4: -2.0, 8: 1.25, 9: 0.75})
    assert list(hypotheses) == [SCALED.format("")]
    hypothesis = hypotheses[SCALED.format("")]
    torch.testing.assert_close(hypothesis.output, actual)
    assert hypothesis.num_fitted == 10
    assert hypothesis.detail == (
        "0.5 for output 1, 3 for output 3, -2 for output 4, 1.25 for output 8; 5 of 12 are scaled"
    )


def test_factors_of_all_rows_need_not_be_located():
    _, hypotheses = causes({output: 1.5 + output for output in range(12)})
    assert hypotheses[SCALED.format("")].num_fitted == 12


def test_some_zero_and_some_scaled_are_both_said():
    actual, hypotheses = causes({1: 0.0, 2: 0.0, 5: 3.0})
    assert set(hypotheses) == {ZERO.format(""), SCALED.format("")}
    torch.testing.assert_close(hypotheses[SCALED.format("")].output, actual)
    output = X @ WEIGHT.T
    output[:, [1, 2]] = 0
    torch.testing.assert_close(hypotheses[ZERO.format("")].output, output)


@pytest.mark.parametrize(("bias_too", "what"), [(True, ""), (False, BUT)])
@pytest.mark.parametrize(("factor", "cause"), [(0.0, ZERO), (-1.0, NEGATED), (0.5, SCALED)])
def test_with_the_bias_and_without(factor, cause, bias_too, what):
    actual, hypotheses = causes({2: factor, 7: factor}, bias=BIAS, bias_too=bias_too)
    torch.testing.assert_close(hypotheses[cause.format(what)].output, actual)
    assert (SCALED.format(what) in hypotheses) == (cause == SCALED)
    another = "" if what else BUT
    assert not any(
        torch.allclose(hypothesis.output, actual)
        for key, hypothesis in hypotheses.items()
        if another in key and key != cause.format(what)
    )


@pytest.mark.parametrize(("dtype", "roundings"), [(torch.float32, 60), (torch.bfloat16, 3), (torch.float16, 3)])
def test_outputs_count_from_more_than_rounding(dtype, roundings):
    unit = rounding_unit(dtype)
    for times, is_seen in ((0.9, False), (1.1, True)):
        _, hypotheses = causes({3: 1 + times * roundings * unit}, dtype=dtype)
        assert bool(hypotheses) == is_seen


def test_a_right_row_says_nothing():
    assert causes({})[1] == {}


RECORDED_TAP, SOURCE = "model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm"
ROW = 3


def explained(bench, weights, change):
    """Explain k_proj whose row 3 is changed: `change` gets its blocks of 16 weights, and gives other ones."""
    weight = bench.weight(RECORDED_TAP).clone()
    weight[ROW] = change(weight[ROW].unflatten(0, (-1, 16))).flatten()
    recording = bench.planted({RECORDED_TAP: bench.tap(SOURCE) @ weight.T})
    manifest = recording.manifest.model_copy(update={"numerics": Numerics(weights=weights)})
    return bench.explained(Recording(recording.path, manifest, recording.steps), RECORDED_TAP)


@pytest.mark.parametrize(("weights", "num_fitted"), [(("Q6_K",), 7), (("Q8_0", "Q6_K"), 7)])
def test_blocks_have_the_size_of_the_declared_format(bench, weights, num_fitted):
    explanation = explained(bench, weights, lambda blocks: blocks * torch.tensor([1, 2, 1, 0.5, 1, 1])[:, None])
    assert explanation.cause == "the scales of blocks in row 3 of the quantised weight are others"
    assert explanation.detail == "factors 1, 2, 1, 0.5, 1, 1"
    assert explanation.num_fitted == num_fitted


def test_blocks_with_the_scale_of_the_next(bench):
    def shifted(blocks):
        largest = blocks.abs().amax(dim=1, keepdim=True)
        return blocks * torch.cat((largest[1:], largest[-1:])) / largest

    assert explained(bench, ("Q6_K",), shifted).detail == "5 of 6 blocks have the scale of the next"


def test_a_minimum_of_each_block_is_fitted_where_the_format_has_one(bench):
    def changed(blocks):
        larger = blocks.unflatten(0, (-1, 2))
        larger[1] = 1.5 * larger[1] + 0.5 * larger.min()  # scale times integer minus minimum, under another scale
        return larger.flatten(0, 1)

    explanation = explained(bench, ("Q4_K",), changed)
    assert explanation.cause == "the scales of blocks in row 3 of the quantised weight are others"
    assert explanation.detail == "factors 1, 1.5, 1"
    assert explained(bench, ("Q8_0",), changed).cause != explanation.cause


def test_an_engine_that_declares_nothing_has_no_blocks(bench):
    explanation = explained(bench, (), lambda blocks: blocks * torch.tensor([1, 2, 1, 0.5, 1, 1])[:, None])
    assert "scales" not in explanation.cause


@pytest.mark.parametrize(("rows", "width", "weights"), [
    (12, 128, ()), (12, 120, ("int8",)), (4, 128, ("int8",)), (12, 128, ("int8",)),
])  # fmt: skip
def test_scales_are_fitted_only_where_blocks_and_rows_are_there(rows, width, weights):
    x, weight = random(rows, width), random(5, width, seed=1)
    operation = Operation(tap=RECORDED_TAP, kind=Kind.LINEAR, source=RECORDED_TAP)
    recording = SimpleNamespace(manifest=SimpleNamespace(numerics=Numerics(weights=weights)))
    wrong = failure_of(
        operation, 2 * x @ weight.T, x @ weight.T, x,
        model=ToyModel(operation, modules={RECORDED_TAP: linear(weight)}), recording=recording,
    )  # fmt: skip
    assert bool(list(scales_of_blocks(wrong))) == ((rows, width, weights) == (12, 128, ("int8",)))
