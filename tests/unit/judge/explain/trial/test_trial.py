"""What may be asserted: fitted numbers against independent values, one row near the bound, equal fits."""

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.trial.trial import Trial, WrongRows, distance

WIDTH = 64


class Rows64:
    """Rows that should be `expected` and are `actual`, as far as a trial looks at a failure."""

    def __init__(self, expected, actual, dtype):
        self.expected, self.actual, self.dtype = expected, actual, dtype

    @property
    def num_elements(self):
        error = self.actual - self.expected
        energy = (error / error.norm(dim=1, keepdim=True)).square().sum(dim=0)
        return float(energy.sum() ** 2 / energy.square().sum())


def random(rows, seed=0):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def evidence(expected, actual, dtype=torch.float32, bound=3.0):
    error = (actual - expected).norm(dim=1) / expected.norm(dim=1) / rounding_unit(dtype)
    return WrongRows(Rows64(expected, actual, dtype), error, torch.full((len(expected),), bound, dtype=torch.float64))


@pytest.mark.parametrize(("freedom", "is_supported"), [(0, True), (1, True), (60, True), (4 * WIDTH, False)])
def test_each_fitted_number_needs_values(freedom, is_supported):
    expected, actual = random(3), random(3, seed=1)
    trial = Trial.of(Hypothesis(cause="", output=actual, freedom=freedom), evidence(expected, actual))
    assert bool(trial.holds.all())
    assert trial.is_cause == is_supported


def test_copies_of_a_row_support_nothing_more():
    expected, actual = random(1).repeat(9, 1), random(1, seed=1).repeat(9, 1)
    hypothesis = Hypothesis(cause="", output=actual, freedom=WIDTH)
    assert not Trial.of(hypothesis, evidence(expected, actual)).is_cause
    assert Trial.of(hypothesis, evidence(random(9), random(9, seed=1))).hypothesis.freedom == WIDTH
    others = random(9, seed=1)
    assert Trial.of(Hypothesis(cause="", output=others, freedom=WIDTH), evidence(random(9), others)).is_cause


def test_an_error_of_one_element_supports_few_numbers():
    expected = random(4)
    actual = expected.clone()
    actual[:, 7] += 1
    few, many = (Hypothesis(cause="", output=actual, freedom=freedom) for freedom in (2, 3))
    assert Trial.of(few, evidence(expected, actual)).is_cause
    assert not Trial.of(many, evidence(expected, actual)).is_cause


@pytest.mark.parametrize(
    ("rows", "roundings", "is_cause"), [(1, 6.0, False), (2, 6.0, True), (3, 6.0, True), (1, 60.0, True)]
)
def test_near_the_bound_one_row_is_too_little(rows, roundings, is_cause):
    expected, dtype = random(rows), torch.bfloat16
    actual = expected + random(rows, seed=1) * roundings * rounding_unit(dtype)
    trial = Trial.of(Hypothesis(cause="", output=actual), evidence(expected, actual, dtype))
    assert bool(trial.holds.all())
    assert trial.is_cause == is_cause


def test_the_likelier_fit_is_better_and_a_fitted_number_costs():
    expected, truth = random(8), random(8, seed=1)
    unit = rounding_unit(torch.float32)
    actual = truth + random(8, seed=2) * unit
    held = evidence(expected, actual)
    right, near, fitted = (
        Trial.of(Hypothesis(cause="", output=output, freedom=freedom), held)
        for output, freedom in ((truth, 0), (truth + random(8, seed=3) * unit, 0), (truth, 5))
    )
    assert right.is_better_than(near)
    assert not near.is_better_than(right)
    assert not near.is_as_good_as(right)
    assert right.is_better_than(fitted)
    assert fitted.is_better_than(near)


def test_what_the_rows_cannot_tell_apart_is_as_good():
    expected, truth = random(8), random(8, seed=1)
    unit = rounding_unit(torch.float32)
    held = evidence(expected, truth + random(8, seed=2) * unit)
    one, other = (
        Trial.of(Hypothesis(cause="", output=output), held)
        for output in (truth, truth + 0.02 * unit * random(8, seed=3))
    )
    assert one.is_as_good_as(other)
    assert other.is_as_good_as(one)
    assert 0 < distance(one, other) < 0.1 * unit


def test_what_only_points_elsewhere_comes_last():
    expected, truth = random(8), random(8, seed=1)
    held = evidence(expected, truth)
    vague, clear = (Trial.of(Hypothesis(cause="", output=truth, is_vague=is_vague), held) for is_vague in (True, False))
    assert clear.is_better_than(vague)
    assert not vague.is_better_than(clear)
    assert not vague.is_as_good_as(clear)


def test_rows_are_counted_by_what_they_hold():
    actual = random(3)[[0, 1, 1, 2]]
    held = evidence(random(4, seed=5), actual)
    assert held.distinct(torch.tensor([True, True, True, False])) == 2
    assert held.distinct(torch.zeros(4, dtype=torch.bool)) == 0


@pytest.mark.parametrize(("roundings", "is_cause"), [(6.0, False), (60.0, True)])
def test_near_the_bound_a_fitted_number_needs_more_values(roundings, is_cause):
    expected, dtype = random(4), torch.bfloat16
    actual = expected.clone()
    actual[:, 7] += roundings * rounding_unit(dtype) * expected.norm(dim=1)
    held = evidence(expected, actual, dtype)
    assert Trial.of(Hypothesis(cause="", output=actual, freedom=1), held).is_cause == is_cause
