"""Two trials against each other, and one against its limits, in numbers that can be counted on fingers."""

import math
from types import SimpleNamespace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.core.wrong_operation import Hypothesis
from harness.judge.explain.trial.ranking import Trial, distance

NOTHING = torch.zeros(1, 1)


def trial(num_holds, residual=1.0, *, rows=8, num_values=40.0, num_fitted=0, is_vague=False, unknown=None):
    holds = torch.arange(rows) < num_holds
    if not isinstance(residual, torch.Tensor):
        residual = torch.full((rows,), residual, dtype=torch.float64)
    hypothesis = Hypothesis(cause="", output=NOTHING, num_fitted=num_fitted, is_vague=is_vague, unknown=unknown)
    return Trial(hypothesis, residual, holds, num_values, is_supported=True)


@pytest.mark.parametrize(("num_holds", "fits"), [(4, False), (6, False), (7, True), (8, True)])
def test_85_of_100_rows_must_fit(num_holds, fits):
    assert trial(num_holds).fits == fits
    assert trial(num_holds).share == num_holds / 8


@pytest.mark.parametrize(("rows", "margin"), [(8, 1.0), (50, 1.0), (100, 2.0), (200, 4.0)])
def test_the_margin_is_one_row_or_one_in_fifty(rows, margin):
    assert trial(rows, rows=rows).margin == pytest.approx(margin)


@pytest.mark.parametrize(
    ("rows", "more", "decides"),
    [(8, 1, True), (8, 2, True), (100, 1, False), (100, 2, True), (200, 3, False), (200, 4, True)],
)
def test_more_rows_come_first_from_the_margin_on(rows, more, decides):
    """The one with more rows has the worse residual."""
    most, best = trial(rows - 1, 5.0, rows=rows), trial(rows - 1 - more, 1.0, rows=rows)
    assert most.is_better_than(best) == decides
    assert best.is_better_than(most) == (not decides)
    assert not best.is_as_good_as(most) or not decides
    assert not most.is_as_good_as(best)


def odds(first_residual, second_residual, num_values=40.0, first=0, second=0):
    """The logarithm of the odds by which the first is the less likely: four values count as one."""
    count = num_values / 4
    return count * (math.log(first_residual) - math.log(second_residual)) + (first - second) / 2 * math.log(count)


@pytest.mark.parametrize(
    ("first_residual", "second_residual", "first", "second"),
    [(2.0, 1.0, 0, 0), (1.0, 3.0, 0, 0), (1.0, 1.0, 5, 2), (2.0, 4.0, 3, 0), (0.5, 4.0, 0, 0)],
)
def test_the_odds_of_two_fits(first_residual, second_residual, first, second):
    a, b = trial(8, first_residual, num_fitted=first), trial(8, second_residual, num_fitted=second)
    assert a.lags(b) == pytest.approx(odds(first_residual, second_residual, first=first, second=second))
    assert b.lags(a) == pytest.approx(-a.lags(b))


def test_the_odds_are_those_of_the_larger_number_of_values():
    assert trial(8, 2.0, num_values=40).lags(trial(8, num_values=80)) == pytest.approx(odds(2, 1, 80))
    assert trial(8, 2.0, num_values=80).lags(trial(8, num_values=40)) == pytest.approx(odds(2, 1, 80))
    few = trial(8, num_values=4, num_fitted=6).lags(trial(8, num_values=4))
    assert few == pytest.approx(3), "a number costs half at least"


def test_residuals_below_half_a_rounding_and_nearly_equal_ones_are_alike():
    assert trial(8, 0.1).lags(trial(8, 0.4)) == 0
    assert trial(8, 0.5).lags(trial(8, 0.4)) == 0
    assert trial(8, 0.6).lags(trial(8, 0.1)) == pytest.approx(odds(0.6, 0.5))
    assert trial(8, math.exp(0.019)).lags(trial(8)) == 0
    assert trial(8, math.exp(0.021)).lags(trial(8)) == pytest.approx(10 * 0.021)


def test_only_rows_that_both_know_are_compared():
    residual = torch.tensor([4.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert trial(2, residual).lags(trial(8)) == pytest.approx(odds(4, 1))
    unknown = torch.arange(8) < 1
    assert trial(2, residual, unknown=unknown).known.tolist() == [False, True] + [False] * 6
    assert trial(2, residual, unknown=torch.arange(8) < 2).lags(trial(8)) == 0
    assert trial(8, residual).lags(trial(2, 2.0)) == pytest.approx(odds(4, 2))


@pytest.mark.parametrize(("residual", "is_as_good"), [(math.exp(0.29), True), (math.exp(0.31), False)])
def test_fits_are_alike_up_to_odds_of_three(residual, is_as_good):
    best, another = trial(8), trial(8, residual)
    assert another.is_as_good_as(best) == is_as_good
    assert best.is_better_than(another) == (not is_as_good)
    assert not another.is_better_than(best)
    assert best.is_as_good_as(another)


def test_of_what_fits_alike_the_vague_comes_last():
    vague, clear = trial(8, is_vague=True), trial(8)
    assert clear.is_better_than(vague)
    assert not vague.is_better_than(clear)
    assert not vague.is_as_good_as(clear)
    assert clear.is_as_good_as(vague)
    assert vague.is_as_good_as(trial(8, is_vague=True))
    assert not vague.is_better_than(trial(8, is_vague=True))


# One hypothesis against the rows.

WIDTH = 4
UNIT = rounding_unit(torch.float32)


def of(residual, roundings, bound, *, num_fitted=0, allowance=2.0, unknown=None, num_elements=float(WIDTH)):
    """A trial of rows that are each `residual` roundings off, and were `roundings` off."""
    output = torch.eye(WIDTH, dtype=torch.float64)[: len(residual)] * torch.arange(1.0, len(residual) + 1)[:, None]
    error = torch.tensor(residual, dtype=torch.float64)[:, None] * UNIT * output.norm(dim=1, keepdim=True)
    actual = output + error * torch.eye(WIDTH, dtype=torch.float64).roll(1, dims=1)[: len(residual)]
    roundings, bound = (torch.tensor(values, dtype=torch.float64) for values in (roundings, bound))
    wrong = SimpleNamespace(
        actual=actual, expected=output, dtype=torch.float32, num_elements=num_elements, roundings=roundings, bound=bound
    )
    hypothesis = Hypothesis(cause="", output=output, num_fitted=num_fitted, allowance=allowance, unknown=unknown)
    return Trial.of(hypothesis, wrong)


def test_a_row_holds_up_to_twice_its_bound_and_half_its_error():
    trial = of([5.9, 6.1, 5.9, 5.9], [100.0, 100.0, 11.9, 11.7], [3.0, 3.0, 3.0, 3.0])
    assert trial.holds.tolist() == [True, False, True, False]
    torch.testing.assert_close(
        trial.residual, torch.tensor([5.9, 6.1, 5.9, 5.9], dtype=torch.float64), rtol=1e-6, atol=0
    )
    assert of([2.9, 3.1], [100.0] * 2, [3.0] * 2, allowance=1.0).holds.tolist() == [True, False]
    exact = of([1.9, 2.1], [100.0] * 2, [0.0] * 2, allowance=1.0)
    assert exact.holds.tolist() == [True, False], "where nothing is rounded, a cause may round"
    assert of([1.9, 2.1], [100.0] * 2, [0.5] * 2).holds.tolist() == [True, False], "a bound of one rounding at least"


def test_values_are_counted_by_rows_and_elements():
    trial = of([1.0, 1.0, 90.0], [100.0] * 3, [3.0] * 3, num_elements=2.5)
    assert trial.num_values == 5.0


@pytest.mark.parametrize(("num_fitted", "is_supported"), [(5, True), (6, False)])
def test_numbers_need_one_and_a_half_values_each(num_fitted, is_supported):
    assert of([1.0] * 2, [100.0] * 2, [3.0] * 2, num_fitted=num_fitted).is_supported == is_supported


@pytest.mark.parametrize(
    ("roundings", "num_fitted", "is_supported"), [(11.9, 1, False), (12.1, 1, True), (12.1, 5, True)]
)
def test_near_the_bound_they_need_ten(roundings, num_fitted, is_supported):
    """Eight values; near is below four times the bound."""
    assert of([1.0] * 2, [roundings] * 2, [3.0] * 2, num_fitted=num_fitted).is_supported == is_supported


def test_rows_that_are_not_known_hold_where_all_others_do():
    unknown = torch.tensor([False, False, True, True])
    assert of([1.0, 1.0, 90.0, 90.0], [100.0] * 4, [3.0] * 4, unknown=unknown).holds.tolist() == [True] * 4
    assert of([1.0, 90.0, 90.0, 90.0], [100.0] * 4, [3.0] * 4, unknown=unknown).holds.tolist() == [True] + [False] * 3
    everything = torch.ones(4, dtype=torch.bool)
    assert of([90.0] * 4, [100.0] * 4, [3.0] * 4, unknown=everything).holds.tolist() == [False] * 4


def test_rows_of_zeros():
    """A row that should be zero and is, is exactly right; one that is not, is off by infinitely much."""
    zeros, ones = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    bound = torch.ones(2, dtype=torch.float64)
    for actual, is_right in ((zeros, True), (ones, False), (ones * torch.nan, False)):
        wrong = SimpleNamespace(
            actual=actual, expected=ones, dtype=torch.float32, num_elements=3.0, roundings=100 * bound, bound=bound
        )
        trial = Trial.of(Hypothesis(cause="", output=zeros), wrong)
        assert (trial.residual == 0).tolist() == trial.holds.tolist() == [is_right] * 2
        assert (trial.residual > 1e300).tolist() == [not is_right] * 2


def test_the_distance_of_two_hypotheses_is_that_of_the_middle_row():
    one = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]], dtype=torch.float64)
    another = torch.tensor([[1.0, 0.5], [2.0, 0.2], [0.0, 8.0]], dtype=torch.float64)
    first, second = (Trial(Hypothesis(cause="", output=x), one, one, 1.0, is_supported=True) for x in (one, another))
    assert distance(first, second) == pytest.approx(0.5)


# Rows of 64 elements.

RECORDED_WIDTH = 64


class Rows64:
    """Rows that should be `expected` and are `actual`, as far as a trial looks at them."""

    def __init__(self, expected, actual, dtype=torch.float32, bound=3.0):
        self.expected, self.actual, self.dtype = expected, actual, dtype
        self.roundings = (actual - expected).norm(dim=1) / expected.norm(dim=1) / rounding_unit(dtype)
        self.bound = torch.full((len(expected),), bound, dtype=torch.float64)

    @property
    def num_elements(self):
        error = self.actual - self.expected
        energy = (error / error.norm(dim=1, keepdim=True)).square().sum(dim=0)
        return float(energy.sum() ** 2 / energy.square().sum())


def random(rows, seed=0):
    return torch.randn(rows, RECORDED_WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("num_fitted", "is_supported"), [(0, True), (1, True), (60, True), (4 * RECORDED_WIDTH, False)]
)
def test_each_fitted_number_needs_values(num_fitted, is_supported):
    expected, actual = random(3), random(3, seed=1)
    trial = Trial.of(Hypothesis(cause="", output=actual, num_fitted=num_fitted), Rows64(expected, actual))
    assert bool(trial.holds.all())
    assert trial.is_cause == is_supported


def test_copies_of_a_row_support_nothing_more():
    expected, actual = random(1).repeat(9, 1), random(1, seed=1).repeat(9, 1)
    hypothesis = Hypothesis(cause="", output=actual, num_fitted=RECORDED_WIDTH)
    assert not Trial.of(hypothesis, Rows64(expected, actual)).is_cause
    assert Trial.of(hypothesis, Rows64(random(9), random(9, seed=1))).hypothesis.num_fitted == RECORDED_WIDTH
    others = random(9, seed=1)
    assert Trial.of(Hypothesis(cause="", output=others, num_fitted=RECORDED_WIDTH), Rows64(random(9), others)).is_cause


def test_an_error_of_one_element_supports_few_numbers():
    expected = random(4)
    actual = expected.clone()
    actual[:, 7] += 1
    few, many = (Hypothesis(cause="", output=actual, num_fitted=num_fitted) for num_fitted in (2, 3))
    assert Trial.of(few, Rows64(expected, actual)).is_cause
    assert not Trial.of(many, Rows64(expected, actual)).is_cause


@pytest.mark.parametrize(
    ("rows", "roundings", "is_cause"), [(1, 6.0, False), (2, 6.0, True), (3, 6.0, True), (1, 60.0, True)]
)
def test_near_the_bound_one_row_is_too_little(rows, roundings, is_cause):
    expected, dtype = random(rows), torch.bfloat16
    actual = expected + random(rows, seed=1) * roundings * rounding_unit(dtype)
    trial = Trial.of(Hypothesis(cause="", output=actual), Rows64(expected, actual, dtype))
    assert bool(trial.holds.all())
    assert trial.is_cause == is_cause


def test_the_likelier_fit_is_better_and_a_fitted_number_costs():
    expected, truth = random(8), random(8, seed=1)
    unit = rounding_unit(torch.float32)
    actual = truth + random(8, seed=2) * unit
    held = Rows64(expected, actual)
    right, near, fitted = (
        Trial.of(Hypothesis(cause="", output=output, num_fitted=num_fitted), held)
        for output, num_fitted in ((truth, 0), (truth + random(8, seed=3) * unit, 0), (truth, 5))
    )
    assert right.is_better_than(near)
    assert not near.is_better_than(right)
    assert not near.is_as_good_as(right)
    assert right.is_better_than(fitted)
    assert fitted.is_better_than(near)


def test_what_the_rows_cannot_tell_apart_is_as_good():
    expected, truth = random(8), random(8, seed=1)
    unit = rounding_unit(torch.float32)
    held = Rows64(expected, truth + random(8, seed=2) * unit)
    one, another = (
        Trial.of(Hypothesis(cause="", output=output), held)
        for output in (truth, truth + 0.02 * unit * random(8, seed=3))
    )
    assert one.is_as_good_as(another)
    assert another.is_as_good_as(one)
    assert 0 < distance(one, another) < 0.1 * unit


def test_what_only_points_elsewhere_comes_last():
    expected, truth = random(8), random(8, seed=1)
    held = Rows64(expected, truth)
    vague, clear = (Trial.of(Hypothesis(cause="", output=truth, is_vague=is_vague), held) for is_vague in (True, False))
    assert clear.is_better_than(vague)
    assert not vague.is_better_than(clear)
    assert not vague.is_as_good_as(clear)


def test_rows_are_counted_by_what_they_hold():
    actual = random(3)[[0, 1, 1, 2]]
    held = Rows64(random(4, seed=5), actual)
    output = actual.clone()
    output[3] = 0
    for rows, num_rows in ((output, 2), (torch.zeros_like(actual), 0)):
        trial = Trial.of(Hypothesis(cause="", output=rows), held)
        assert trial.num_values == num_rows * held.num_elements


@pytest.mark.parametrize(("roundings", "is_cause"), [(6.0, False), (60.0, True)])
def test_near_the_bound_a_fitted_number_needs_more_values(roundings, is_cause):
    expected, dtype = random(4), torch.bfloat16
    actual = expected.clone()
    actual[:, 7] += roundings * rounding_unit(dtype) * expected.norm(dim=1)
    held = Rows64(expected, actual, dtype)
    assert Trial.of(Hypothesis(cause="", output=actual, num_fitted=1), held).is_cause == is_cause
