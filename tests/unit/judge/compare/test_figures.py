"""Figures of one operation for the report."""

import math

import pytest
import torch

from harness.judge.compare.align import Rows
from harness.judge.compare.judged import _control_figures, tap_result
from harness.judge.compare.row_judge import LocalErrors
from harness.results.check import Effect, RowId

from .judgements import errors_of, judgement, metrics_of, propagated_of


def errors(control, bound):
    at = torch.arange(len(control))
    return LocalErrors(
        rows=Rows(request=torch.zeros_like(at), position=at, step=torch.zeros_like(at)),
        roundings=torch.ones(len(control)), bound=torch.tensor(bound), control=torch.tensor(control),
    )  # fmt: skip


def test_a_control_without_an_error_takes_nothing_of_a_bound_of_zero():
    assert _control_figures(errors([0.0, 0.0], [0.0, 2.0]))["control_bound_share_max"] == 0.0


def test_the_largest_share_of_a_bound_and_the_largest_error_may_be_of_different_rows():
    found = _control_figures(errors([1.0, 3.0, torch.inf], [2.0, 30.0, 1.0]))
    assert found == {"control_roundings_max": 3.0, "control_bound_share_max": 0.5}


# The whole of a tap, by hand.


def measured():
    """Four rows of three elements: equal, off by a step in the second element, opposite, off in the third."""
    expected = torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 12.0], [1.0, 0.0, 0.0], [0.0, 2.0, 2.0]], dtype=torch.float64)
    actual = expected.clone()
    actual[1, 1] += 1.3
    actual[2] = -actual[2]
    actual[3, 2] += 0.5
    return propagated_of([0.0, 1.0, 8.0, 4.0], metrics=metrics_of(actual, expected))


def test_figures_of_propagation():
    found = tap_result(judgement(propagated=measured()))
    assert (found.name, found.site, found.layer, found.kind) == ("layers.3.mlp.act", "mlp.act", 3, "activation")
    assert (found.num_rows, found.judged_by, found.num_bad_rows, found.first_bad) == (4, "propagated", 0, None)
    assert found.propagated_relative_l2_max == 2
    assert found.propagated_ratio_max == 8
    assert found.propagated_ratio_median == 1
    assert found.max_abs == 2
    assert found.max_ulp == pytest.approx(2**53)
    assert found.cosine_min == -1
    assert found.sqnr_db_min == pytest.approx(-20 * math.log10(2))
    assert (found.num_nan, found.num_inf) == (0, 0)
    assert found.worst == RowId(request=2, position=3, index=0)
    assert (found.local_roundings_max, found.convention, found.effect) == (None, None, None)
    assert not found.is_bounded_by_control
    assert tap_result(judgement(propagated=measured(), is_in_graph=False)).judged_by == "none"


def test_what_is_not_finite_is_counted():
    actual, expected = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    actual[0, :2], actual[1, 0] = torch.nan, torch.inf
    rows = [(0, 0), (0, 1)]
    found = tap_result(judgement(propagated=propagated_of([1.0] * 2, rows=rows, metrics=metrics_of(actual, expected))))
    assert (found.num_nan, found.num_inf, found.num_bad_rows) == (2, 1, 2)
    assert found.first_bad.position == 0


def test_figures_of_errors_in_roundings():
    control = torch.tensor([0.5, 3.0, 0.0, math.nan], dtype=torch.float64)
    errors = errors_of(
        (0.0, 1.5, 4.0, math.nan), (0.0, 2.0, 3.0, 1.0), control=control, convention="some", unrecorded=("a",),
        is_bounded_by_control=True,
    )  # fmt: skip
    found = tap_result(judgement(errors, propagated=measured()))
    assert (found.judged_by, found.convention, found.through) == ("local", "some", ("a",))
    assert found.is_bounded_by_control
    assert found.local_roundings_median == 1.5
    assert found.local_roundings_max == 4
    assert found.local_roundings_p99 == pytest.approx(1.5 + 0.98 * 2.5)
    assert found.local_bound_share_max == pytest.approx(4 / 3)
    assert (found.control_roundings_max, found.control_bound_share_max) == (3, math.inf)
    assert found.num_bad_rows == 1
    assert found.first_bad == RowId(request=2, position=3, index=0)
    assert found.worst == RowId(request=2, position=3, index=0)
    assert found.propagated_ratio_max == 8


@pytest.mark.parametrize(("roundings", "p99"), [((1.0, math.inf, 0.0, 2.0), math.inf), ((1.0, 2.0, 0.0, 3.0), 2.97)])
def test_the_99th_percentile_of_what_may_be_infinite(roundings, p99):
    found = tap_result(judgement(errors_of(roundings)))
    assert found.local_roundings_p99 == pytest.approx(p99)


def test_rows_none_of_which_can_be_judged_have_no_figures():
    found = tap_result(judgement(cache=errors_of([math.nan] * 4)))
    assert (found.local_roundings_max, found.judged_by) == (None, "cache")
    assert found.worst == RowId(request=7, position=1)


def test_the_worst_row_is_that_of_the_largest_known_error():
    found = tap_result(judgement(errors_of((math.nan, 0.5, 0.7, 0.1))))
    assert found.worst == RowId(request=2, position=3), "without an element, which only propagation measures"


def test_an_element_is_that_of_the_same_row_in_the_same_step():
    """A row that was computed twice stands twice in what was measured."""
    expected = torch.ones(3, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[1, 2] = 5.0
    metrics = metrics_of(actual, expected)
    twice = propagated_of([1.0] * 3, rows=[(2, 3), (2, 3), (2, 4)], metrics=metrics)
    at_first = judgement(errors_of((9.0, 0.0), rows=[(2, 3), (2, 4)]), propagated=twice)
    assert tap_result(at_first).worst == RowId(request=2, position=3)
    again = judgement(errors_of((0.0, 9.0), rows=[(7, 0), (2, 3)]), propagated=twice)
    assert tap_result(again).worst == RowId(request=2, position=3, index=2)
    elsewhere = judgement(errors_of((9.0,), rows=[(8, 3)]), propagated=twice)
    assert tap_result(elsewhere).worst == RowId(request=8, position=3)


def test_an_effect_is_shown_where_no_row_is_bad():
    effect = Effect(
        kind="gain", which="", size=1.0, low=0.9, high=1.1, roundings=3.0, statistic=20.0, num_rows=50
    )  # fmt: skip
    assert tap_result(judgement(errors_of([1.0] * 4, effect=effect))).effect is effect
    assert tap_result(judgement(errors_of([9.0] * 4, effect=effect))).effect is None


def test_rows_without_an_error_take_nothing_of_a_bound_of_zero():
    assert tap_result(judgement(errors_of([0.0] * 4, [0.0, 1.0, 0.0, 2.0]))).local_bound_share_max == 0
