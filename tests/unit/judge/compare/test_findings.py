"""What is said of a tap that is wrong, word for word."""

import math

import pytest
import torch

from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.compare.judged import bad_finding, oracle_finding, systematic_finding
from harness.judge.compare.propagated import Propagation
from harness.results.check import Effect

from .judgements import errors_of, judgement, metrics_of, propagated_of

TAP = "layers.3.mlp.act"
COUNT = "in 2 of 4 rows, the first at request 2, position 3"
BAD = (0.0, 1.0, 2.516, 30.0)


@pytest.mark.parametrize(
    ("judged", "code", "message"),
    [
        (judgement(errors_of(BAD)), Code.LOCAL_ERROR, f"{TAP} is out of bounds {COUNT}: 2.52 roundings, bound 2"),
        (
            judgement(errors_of(BAD, unrecorded=("a", "b"))),
            Code.LOCAL_ERROR,
            f"{TAP} is out of bounds {COUNT}: 2.52 roundings, bound 2, computed through 2 taps that were not recorded",
        ),
        (
            judgement(errors_of((0.0, 1.0, math.inf, 30.0))),
            Code.NOT_FINITE,
            f"{TAP} is not finite though its inputs are {COUNT}",
        ),
        (
            judgement(cache=errors_of(BAD)),
            Code.CACHE_DIFFERS,
            f"{TAP} read back through the block table differs from what was written {COUNT}",
        ),
        (
            judgement(errors_of(BAD), kind=Kind.CHOICE),
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
    found = bad_finding(judged)
    assert (found.code, found.message) == (code, message)
    assert (found.tap, found.request, found.position) == (TAP, 2, 3)


def broken(rows, *, side="expected"):
    sides = {"actual": torch.ones(4, 3, dtype=torch.float64), "expected": torch.ones(4, 3, dtype=torch.float64)}
    sides[side][rows, 1] = torch.nan
    return propagated_of([1.0] * 4, metrics=metrics_of(sides["actual"], sides["expected"]))


def test_a_tap_that_is_not_finite_by_propagation():
    found = bad_finding(judgement(propagated=broken([0, 2], side="actual")))
    assert found.message == f"{TAP} is not finite {COUNT}"


def test_what_the_rows_show_together():
    effect = Effect(
        kind="gain of head", which="3", size=-0.00123, low=-0.002, high=-0.0004, roundings=-0.456, statistic=-12.34,
        num_rows=77,
    )  # fmt: skip
    found = systematic_finding(judgement(errors_of([1.0] * 4, effect=effect)))
    assert (found.code, found.tap, found.request) == (Code.SYSTEMATIC_ERROR, TAP, None)
    assert found.message == (
        f"{TAP} has a gain of head 3 of -0.00123 (-0.002 to -0.0004 at 95 %), 0.46 roundings, in 77 rows "
        "(t = 12.3): rounding has no direction"
    )


def test_the_first_row_at_which_the_expected_side_is_not_finite():
    sound = propagated_of([1.0] * 4)
    propagation = Propagation(errors={"a": sound, "b": broken([0, 1]), "c": broken([2])})
    found = oracle_finding(propagation)
    assert found.code is Code.ORACLE_NOT_FINITE
    assert (found.tap, found.request, found.position) == ("b", 2, 5)
    assert found.message == "the expected side of b is not finite at request 2, position 5"
    assert oracle_finding(Propagation(errors={"a": sound, "b": broken([0], side="actual")})) is None
