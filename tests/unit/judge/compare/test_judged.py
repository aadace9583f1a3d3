"""What becomes of the judgements on one tap: which counts, what verdict, what code."""

import math

import pytest
import torch

from harness.errors import Code
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.judged import judge
from harness.judge.compare.propagated import RATIO_BOUND, Propagation
from harness.results.check import Effect, Verdict

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


@pytest.mark.parametrize("beyond", [False, True])
def test_ten_times_the_noise_is_the_limit_of_propagation(beyond):
    ratio = [1.0, RATIO_BOUND + 0.01 * beyond, 0.0, RATIO_BOUND]
    found = judgement(propagated=propagated_of(ratio))
    assert found.bad.tolist() == [False, beyond, False, False]
    assert found.verdict is (Verdict.BUG if beyond else Verdict.NOISE)
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
    found = judgement(propagated=odd(engine=(1,), golden=(2,)))
    assert found.bad.tolist() == [False, True, False, False]
    assert found.code is Code.NOT_FINITE
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
    found = judgement(errors_of(BAD), propagated=propagated)
    assert [found.ratio_at(at) for at in range(4)] == [None, None, 4.0, None]
    assert judgement(errors_of(BAD)).ratio_at(0) is None


def test_judgements_are_in_the_order_of_the_graph_and_others_come_last():
    graph = Graph(tuple(Operation(tap=tap, kind=Kind.ADD) for tap in ("a", "b", "c", "d")))
    local, cache = errors_of(SOUND), errors_of(BAD)
    propagation = Propagation(errors={"z": propagated_of([1.0] * 4), "a": propagated_of([2.0] * 4)})
    found = judge(graph, {"c": local, "b": cache}, propagation)
    assert [item.operation.tap for item in found] == ["a", "b", "c", "z"]
    assert [item.is_in_graph for item in found] == [True, True, True, False]
    assert (found[1].errors, found[2].errors) == (cache, local)
    assert (found[0].propagated, found[3].propagated) == (propagation.errors["a"], propagation.errors["z"])
    assert found[3].operation.kind is Kind.OTHER
    assert len(ROWS) == len(found[0].rows)
