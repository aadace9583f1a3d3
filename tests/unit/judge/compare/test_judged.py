"""One tap with every judgement on it: its verdict, its findings word for word, its figures."""

import math

import pytest
import torch

from harness.errors import Code
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.judged import (
    _control_figures,
    bad_finding,
    judge,
    oracle_finding,
    systematic_finding,
    tap_result,
)
from harness.judge.compare.propagated import RATIO_BOUND, Propagation
from harness.judge.compare.row_judge import LocalErrors
from harness.results.check import Effect, RowId, Verdict

from .judgements import ROWS, errors_of, judgement, metrics_of, propagated_of

SOUND, BAD = (0.0, 1.0, 2.0, 0.5), (0.0, 3.0, 2.5, 9.0)
EFFECT = Effect(
    kind="gain", which="", size=1.0, low=0.9, high=1.1, roundings=3.0, statistic=20.0, num_rows=50
)  # fmt: skip


def test_the_sharpest_judgement_counts():
    local, cache, propagated = errors_of(SOUND), errors_of(BAD), propagated_of([99.0] * 4)
    assert judgement(local, cache, propagated).errors is local
    assert judgement(None, cache, propagated).errors is cache
    assert judgement(None, None, propagated).errors is None
    assert judgement(local, cache, propagated).rows is local.rows
    assert judgement(None, None, propagated).rows is propagated.rows
    assert not judgement(local, cache, propagated).is_wrong
    assert judgement(None, cache, propagated).bad.tolist() == [False, True, True, True]


def test_the_first_bad_row_is_of_the_smallest_request_and_position():
    assert judgement(errors_of(BAD)).first_bad == 2
    assert judgement(errors_of((9.0, 9.0, 0.0, 9.0))).first_bad == 1
    assert judgement(errors_of((0.0, 0.0, 0.0, 9.0))).first_bad == 3


@pytest.mark.parametrize("is_above", [False, True])
def test_ten_times_the_noise_is_the_limit_of_propagation(is_above):
    ratio = [1.0, RATIO_BOUND + 0.01 * is_above, 0.0, RATIO_BOUND]
    judged = judgement(propagated=propagated_of(ratio))
    assert judged.bad.tolist() == [False, is_above, False, False]
    assert judged.verdict is (Verdict.BUG if is_above else Verdict.NOISE)
    outside = judgement(propagated=propagated_of(ratio), is_in_graph=False)
    assert outside.bad.tolist() == [False] * 4
    assert outside.verdict is Verdict.UNJUDGED


def odd(engine, golden):
    """Ratios and metrics of four rows; those named are not finite on a side."""
    actual, expected = (torch.ones(4, 3, dtype=torch.float64) for _ in range(2))
    actual[list(engine), 1], expected[list(golden), 0] = torch.nan, torch.inf
    ratio = [math.nan if at in (*engine, *golden) else 1.0 for at in range(4)]
    return propagated_of(ratio, metrics=metrics_of(actual, expected))


def test_rows_that_are_not_finite_are_bad_and_those_without_anything_to_hold_them_to_are_not():
    judged = judgement(propagated=odd(engine=(1,), golden=(2,)))
    assert judged.bad.tolist() == [False, True, False, False]
    assert judged.code is Code.NOT_FINITE
    assert judgement(propagated=odd(engine=(2,), golden=(2,))).bad.tolist() == [False, False, True, False]


def test_codes():
    infinite = (0.0, math.inf, 1.0, 9.0)
    assert judgement(errors_of(BAD)).code is Code.LOCAL_ERROR
    assert judgement(errors_of(infinite)).code is Code.NOT_FINITE
    assert judgement(errors_of((0.0, math.inf, 9.0, 9.0))).code is Code.LOCAL_ERROR, "of the first bad row"
    assert judgement(errors_of(infinite), kind=Kind.CHOICE).code is Code.LOCAL_ERROR
    assert judgement(cache=errors_of(infinite)).code is Code.CACHE_DIFFERS
    assert judgement(propagated=propagated_of([0.0, 99.0, 0.0, 0.0])).code is Code.PROPAGATED_ERROR
    departed = judgement(errors_of(SOUND, effect=EFFECT))
    assert departed.code is Code.SYSTEMATIC_ERROR


def test_verdicts():
    assert judgement(errors_of(BAD, effect=EFFECT)).verdict is Verdict.BUG
    assert judgement(errors_of(SOUND)).verdict is Verdict.NOISE
    assert judgement(errors_of(SOUND, convention="eager")).verdict is Verdict.CONVENTION
    assert judgement(errors_of(SOUND, convention="eager", effect=EFFECT)).verdict is Verdict.SYSTEMATIC
    assert judgement(errors_of([0.0] * 4)).verdict is Verdict.EXACT
    assert judgement(errors_of([0.0] * 4, convention="eager")).verdict is Verdict.EXACT
    assert judgement(cache=errors_of([0.0] * 4)).verdict is Verdict.EXACT
    assert judgement(cache=errors_of([0.0] * 4, convention="kept in float16")).verdict is Verdict.CONVENTION
    assert judgement(propagated=propagated_of([0.0] * 4)).verdict is Verdict.EXACT
    assert judgement(propagated=propagated_of([0.0] * 4), is_in_graph=False).verdict is Verdict.EXACT
    assert judgement(propagated=propagated_of([0.0, 0.5, 0.0, 0.0])).verdict is Verdict.NOISE


def test_what_rows_show_together_is_wrong_where_none_is_by_itself():
    together = judgement(errors_of(SOUND, effect=EFFECT))
    assert (together.is_bad, together.is_wrong) == (False, True)
    assert together.effect.kind == "gain"
    bad = judgement(errors_of(BAD, effect=EFFECT))
    assert (bad.is_bad, bad.is_wrong, bad.effect) == (True, True, None)
    assert judgement(propagated=propagated_of([0.0] * 4)).effect is None


def test_the_propagated_error_of_a_judged_row():
    others = [(7, 2), (1, 3), (8, 3), (2, 2), (2, 4)]
    propagated = propagated_of([4.0, 2.0, *[50.0] * 5], rows=[(2, 3), (2, 3), *others])
    judged = judgement(errors_of(BAD), propagated=propagated)
    assert [judged.ratio_at(at) for at in range(4)] == [None, None, 4.0, None]
    assert judgement(errors_of(BAD)).ratio_at(0) is None


def test_judgements_are_in_the_order_of_the_graph_and_others_come_last():
    graph = Graph(tuple(Operation(tap=tap, kind=Kind.ADD) for tap in ("a", "b", "c", "d")))
    local, cache = errors_of(SOUND), errors_of(BAD)
    propagation = Propagation(errors={"z": propagated_of([1.0] * 4), "a": propagated_of([2.0] * 4)})
    actual = judge(graph, {"c": local, "b": cache}, propagation)
    assert [item.operation.tap for item in actual] == ["a", "b", "c", "z"]
    assert [item.is_in_graph for item in actual] == [True, True, True, False]
    assert (actual[1].errors, actual[2].errors) == (cache, local)
    assert (actual[0].propagated, actual[3].propagated) == (propagation.errors["a"], propagation.errors["z"])
    assert actual[3].operation.kind is Kind.OTHER
    assert len(ROWS) == len(actual[0].rows)


TAP = "layers.3.mlp.act"
COUNT = "in 2 of 4 rows, the first at request 2, position 3"
FOUR_ERRORS = (0.0, 1.0, 2.516, 30.0)


@pytest.mark.parametrize(
    ("judged", "code", "message"),
    [
        (
            judgement(errors_of(FOUR_ERRORS)),
            Code.LOCAL_ERROR,
            f"{TAP} is out of bounds {COUNT}: 2.52 roundings, bound 2",
        ),
        (
            judgement(errors_of(FOUR_ERRORS, unrecorded=("a", "b"))),
            Code.LOCAL_ERROR,
            f"{TAP} is out of bounds {COUNT}: 2.52 roundings, bound 2, computed through 2 taps that were not recorded",
        ),
        (
            judgement(errors_of((0.0, 1.0, math.inf, 30.0))),
            Code.NOT_FINITE,
            f"{TAP} is not finite though its inputs are {COUNT}",
        ),
        (
            judgement(cache=errors_of(FOUR_ERRORS)),
            Code.CACHE_DIFFERS,
            f"{TAP} read back through the block table differs from what was written {COUNT}",
        ),
        (
            judgement(errors_of(FOUR_ERRORS), kind=Kind.CHOICE),
            Code.LOCAL_ERROR,
            f"{TAP} chose other indices than HF does from the same scores {COUNT}: "
            "their scores lie 2.52 times as far below as rounding explains",
        ),
        (
            judgement(errors_of((0.0, 1.0, math.inf, 30.0)), kind=Kind.CHOICE),
            Code.LOCAL_ERROR,
            f"{TAP} chose other indices than HF does from the same scores {COUNT}: "
            "an index does not exist, or is there twice",
        ),
        (
            judgement(propagated=propagated_of([1.0, 2.0, 12.34, 99.0])),
            Code.PROPAGATED_ERROR,
            f"{TAP} is 12.3 times as far from the truth as HF {COUNT}",
        ),
    ],
)
def test_how_a_tap_is_bad(judged, code, message):
    finding = bad_finding(judged)
    assert (finding.code, finding.message) == (code, message)
    assert (finding.tap, finding.request, finding.position) == (TAP, 2, 3)


def broken(rows, *, side="expected"):
    sides = {"actual": torch.ones(4, 3, dtype=torch.float64), "expected": torch.ones(4, 3, dtype=torch.float64)}
    sides[side][rows, 1] = torch.nan
    return propagated_of([1.0] * 4, metrics=metrics_of(sides["actual"], sides["expected"]))


def test_a_tap_that_is_not_finite_by_propagation():
    finding = bad_finding(judgement(propagated=broken([0, 2], side="actual")))
    assert finding.message == f"{TAP} is not finite {COUNT}"


def test_what_the_rows_show_together():
    effect = Effect(
        kind="gain of head", which="3", size=-0.00123, low=-0.002, high=-0.0004, roundings=-0.456, statistic=-12.34,
        num_rows=77,
    )  # fmt: skip
    finding = systematic_finding(judgement(errors_of([1.0] * 4, effect=effect)))
    assert (finding.code, finding.tap, finding.request) == (Code.SYSTEMATIC_ERROR, TAP, None)
    assert finding.message == (
        f"{TAP} has a gain of head 3 of -0.00123 (-0.002 to -0.0004 at 95 %), 0.46 roundings, in 77 rows "
        "(t = 12.3): rounding has no direction"
    )


def test_the_first_row_at_which_the_expected_side_is_not_finite():
    sound = propagated_of([1.0] * 4)
    propagation = Propagation(errors={"a": sound, "b": broken([0, 1]), "c": broken([2])})
    finding = oracle_finding(propagation)
    assert finding.code is Code.ORACLE_NOT_FINITE
    assert (finding.tap, finding.request, finding.position) == ("b", 2, 5)
    assert finding.message == "the expected side of b is not finite at request 2, position 5"
    assert oracle_finding(Propagation(errors={"a": sound, "b": broken([0], side="actual")})) is None


def errors(control, bound):
    at = torch.arange(len(control))
    return LocalErrors(
        rows=Rows(request=torch.zeros_like(at), position=at, step=torch.zeros_like(at)),
        roundings=torch.ones(len(control)), bound=torch.tensor(bound), control=torch.tensor(control),
    )  # fmt: skip


def test_a_control_without_an_error_takes_nothing_of_a_bound_of_zero():
    assert _control_figures(errors([0.0, 0.0], [0.0, 2.0]))["control_bound_share_max"] == 0.0


def test_the_largest_share_of_a_bound_and_the_largest_error_may_be_of_different_rows():
    figures = _control_figures(errors([1.0, 3.0, torch.inf], [2.0, 30.0, 1.0]))
    assert figures == {"control_roundings_max": 3.0, "control_bound_share_max": 0.5}


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
    figures = tap_result(judgement(propagated=measured()))
    assert (figures.name, figures.site, figures.layer, figures.kind) == ("layers.3.mlp.act", "mlp.act", 3, "activation")
    assert (figures.num_rows, figures.judged_by, figures.num_bad_rows, figures.first_bad) == (4, "propagated", 0, None)
    assert figures.propagated_relative_l2_max == 2
    assert figures.propagated_ratio_max == 8
    assert figures.propagated_ratio_median == 1
    assert figures.max_abs == 2
    assert figures.max_ulp == pytest.approx(2**53)
    assert figures.cosine_min == -1
    assert figures.sqnr_db_min == pytest.approx(-20 * math.log10(2))
    assert (figures.num_nan, figures.num_inf) == (0, 0)
    assert figures.worst == RowId(request=2, position=3, index=0)
    assert (figures.local_roundings_max, figures.convention, figures.effect) == (None, None, None)
    assert not figures.is_bounded_by_control
    assert tap_result(judgement(propagated=measured(), is_in_graph=False)).judged_by == "none"


def test_what_is_not_finite_is_counted():
    actual, expected = torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    actual[0, :2], actual[1, 0] = torch.nan, torch.inf
    rows = [(0, 0), (0, 1)]
    figures = tap_result(
        judgement(propagated=propagated_of([1.0] * 2, rows=rows, metrics=metrics_of(actual, expected)))
    )
    assert (figures.num_nan, figures.num_inf, figures.num_bad_rows) == (2, 1, 2)
    assert figures.first_bad.position == 0


def test_figures_of_errors_in_roundings():
    control = torch.tensor([0.5, 3.0, 0.0, math.nan], dtype=torch.float64)
    errors = errors_of(
        (0.0, 1.5, 4.0, math.nan), (0.0, 2.0, 3.0, 1.0), control=control, convention="some", unrecorded=("a",),
        is_bounded_by_control=True,
    )  # fmt: skip
    figures = tap_result(judgement(errors, propagated=measured()))
    assert (figures.judged_by, figures.convention, figures.through) == ("local", "some", ("a",))
    assert figures.is_bounded_by_control
    assert figures.local_roundings_median == 1.5
    assert figures.local_roundings_max == 4
    assert figures.local_roundings_p99 == pytest.approx(1.5 + 0.98 * 2.5)
    assert figures.local_bound_share_max == pytest.approx(4 / 3)
    assert (figures.control_roundings_max, figures.control_bound_share_max) == (3, math.inf)
    assert figures.num_bad_rows == 1
    assert figures.first_bad == RowId(request=2, position=3, index=0)
    assert figures.worst == RowId(request=2, position=3, index=0)
    assert figures.propagated_ratio_max == 8


@pytest.mark.parametrize(("roundings", "p99"), [((1.0, math.inf, 0.0, 2.0), math.inf), ((1.0, 2.0, 0.0, 3.0), 2.97)])
def test_the_99th_percentile_of_what_may_be_infinite(roundings, p99):
    figures = tap_result(judgement(errors_of(roundings)))
    assert figures.local_roundings_p99 == pytest.approx(p99)


def test_rows_none_of_which_can_be_judged_have_no_figures():
    figures = tap_result(judgement(cache=errors_of([math.nan] * 4)))
    assert (figures.local_roundings_max, figures.judged_by) == (None, "cache")
    assert figures.worst == RowId(request=7, position=1)


def test_the_worst_row_is_that_of_the_largest_known_error():
    figures = tap_result(judgement(errors_of((math.nan, 0.5, 0.7, 0.1))))
    assert figures.worst == RowId(request=2, position=3), "without an element, which only propagation measures"


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
