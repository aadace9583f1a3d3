"""The odds that a cause needs where no row is wrong by itself, at both sides of each limit."""

import math
from types import SimpleNamespace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.formats.taps import Kind, Operation
from harness.judge.explain.core.wrong_operation import Hypothesis
from harness.judge.explain.trial import direction
from harness.judge.explain.trial.direction import explain_direction
from harness.judge.explain.trial.ranking import NO_CAUSE

from ..toys import random

ROWS, WIDTH = 10, 16
EXPECTED, ERROR = random(ROWS, WIDTH, seed=1), 1e-3 * random(ROWS, WIDTH, seed=2)
NUM_VALUES = ROWS * WIDTH / 4


@pytest.fixture
def explained(monkeypatch):
    """Explain rows by hypotheses alone; whether the direction is left is given by their causes."""

    def explain(*hypotheses, causes=None):
        monkeypatch.setattr(direction, "causes_of", lambda _kind: causes or [lambda _failure: iter(hypotheses)])
        monkeypatch.setattr(direction, "_is_left", lambda _failure, _effect, output: bool((output == 7).all()))
        failure = SimpleNamespace(
            operation=Operation(tap="x", kind=Kind.LINEAR), actual=EXPECTED + ERROR, expected=EXPECTED,
            dtype=torch.bfloat16,
        )  # fmt: skip
        return explain_direction(failure, None)

    return explain


def leaving(odds, *, num_fitted=0, cause="cause", **others):
    """A hypothesis with these odds: what it leaves of each row's error is a share of it."""
    norms = EXPECTED.norm(dim=1, keepdim=True)
    ratio = math.exp(2 * (odds + num_fitted / 2 * math.log(NUM_VALUES)) / NUM_VALUES)
    assert norms.shape == (ROWS, 1)
    return Hypothesis(cause=cause, output=EXPECTED + ERROR * (1 - ratio**-0.5), num_fitted=num_fitted, **others)


@pytest.mark.parametrize("num_fitted", [0, 3])
@pytest.mark.parametrize(("odds", "is_named"), [(9.9, False), (10.1, True)])
def test_a_cause_needs_odds_of_ten(explained, odds, is_named, num_fitted):
    explanation = explained(leaving(odds, num_fitted=num_fitted, detail="by so much"))
    assert explanation.cause == ("cause" if is_named else NO_CAUSE)
    before = (ERROR.norm(dim=1) / EXPECTED.norm(dim=1) / rounding_unit(torch.bfloat16)).median()
    assert explanation.residual_before == pytest.approx(float(before))
    assert (explanation.num_rows, explanation.scope, explanation.is_cause) == (ROWS, "all rows together", is_named)
    assert explanation.num_explained == (ROWS if is_named else 0)
    assert explanation.num_fitted == (num_fitted if is_named else 0)
    if is_named:
        share = math.exp(-(odds + num_fitted / 2 * math.log(NUM_VALUES)) / NUM_VALUES)
        assert explanation.residual_after == pytest.approx(explanation.residual_before * share)
        assert explanation.detail == "by so much"
    else:
        assert explanation.residual_after is None
        assert explanation.detail == "none of them takes the direction away; a run in float32 shows more"


def test_the_likeliest_is_named_and_what_is_nearly_as_likely(explained):
    explanation = explained(leaving(20, cause="c"), leaving(23, cause="a"), leaving(20.1, cause="b", detail="no"))
    assert (explanation.cause, explanation.detail) == (
        "a, or b",
        "these rows cannot tell them apart: a run in float32 would",
    )
    assert explained(leaving(30, cause="one"), leaving(26, cause="other")).cause == "one"


def test_more_than_three_are_counted(explained):
    four = [leaving(20 - at / 10, cause=name) for at, name in enumerate("abcd")]
    assert explained(*four[:3]).cause == "a, or b, or c"
    assert explained(*four).cause == "a, or b, or c, or 1 others"
    assert explained(*four, leaving(19, cause="e"), leaving(19, cause="f")).cause == "a, or b, or c, or 3 others"


def test_a_cause_that_may_not_be_asserted(explained):
    assert not explained(leaving(20, is_cause=False)).is_cause


def test_outputs_that_cannot_be_compared_or_leave_the_direction(explained):
    whole = EXPECTED + ERROR
    infinite = whole.clone()
    infinite[2, 3] = torch.inf
    for output in (whole[:5], infinite, torch.full_like(whole, 7.0)):
        assert explained(Hypothesis(cause="no", output=output)).cause == NO_CAUSE
    assert explained(Hypothesis(cause="exact", output=whole)).cause == "exact"


def test_an_explanation_that_raises_costs_no_other(explained):
    def raises(_failure):
        raise IndexError("no such row")

    explanation = explained(causes=[raises, lambda _failure: iter([leaving(20)])])
    assert explanation.cause == "cause"


@pytest.mark.parametrize(("left", "is_left"), [(0.24, False), (0.26, True), (-0.26, True), (None, False)])
@pytest.mark.parametrize(("shape", "num_heads"), [((4, 4), 4), ((16,), 1), ((2, 2, 4), 1)])
def test_a_quarter_of_the_direction_may_be_left(monkeypatch, left, is_left, shape, num_heads):
    class Effects:
        def __init__(self, kind, dtype, *, num_heads):
            asked.append(num_heads)

        def add(self, positions, actual, output, rows):
            assert rows.tolist() == [True] * ROWS

        def like(self, effect):
            return None if left is None else SimpleNamespace(size=left * effect.size)

    asked = []
    monkeypatch.setattr(direction, "Effects", Effects)
    operation = Operation(tap="x", kind=Kind.LINEAR, shape=shape)
    failure = SimpleNamespace(operation=operation, dtype=torch.float32, positions=torch.arange(ROWS), actual=EXPECTED)
    for size in (2.0, -2.0):
        assert direction._is_left(failure, SimpleNamespace(size=size), EXPECTED) == is_left
    assert asked == [num_heads] * 2


# The same causes planted in recordings of the reference engine and of HF.

TAP, SOURCE = "model.layers.0.input_layernorm", "model.embed_tokens"
ACT, GATE, UP = (f"model.layers.1.mlp.{name}" for name in ("act", "gate_proj", "up_proj"))
DOWN = "model.layers.1.mlp.down_proj"


def normed(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def recorded_explained(bench, tap, tensor):
    """The explanation of a tap whose rows are all within their bounds."""
    recording = bench.planted({tap: tensor})
    comparison = bench.compare(recording)
    assert not bool(comparison.errors[tap].bad.any())
    assert comparison.errors[tap].effect is not None
    return bench.explain(tap, tensor, code=Code.SYSTEMATIC_ERROR)


def test_a_constant_that_is_slightly_wrong(bench_of):
    bench = bench_of("qwen3-tiny", torch.float16)
    explanation = recorded_explained(bench, TAP, normed(bench.tap(SOURCE), bench.weight(TAP), eps=1e-5))
    assert explanation.cause == "wrong eps: 1e-05 instead of 1e-06"
    assert explanation.is_cause
    assert explanation.residual_after < explanation.residual_before < 4.7
    assert explanation.num_explained > 0.5 * explanation.num_rows


def test_a_gain_is_measured(bench_of):
    bench = bench_of("qwen3-tiny", torch.bfloat16)
    exact = torch.nn.functional.silu(bench.tap(GATE)) * bench.tap(UP)
    explanation = recorded_explained(bench, ACT, exact * 1.004)
    assert explanation.cause.startswith("a constant gain of 1.00")
    assert explanation.num_fitted == 1


def test_an_offset_of_a_channel_is_seen(bench_of):
    bench = bench_of("qwen3-tiny", torch.bfloat16)
    exact = bench.tap(ACT) @ bench.weight(DOWN).T
    exact[:, 5] += 0.012 * exact[:, 5].std()
    assert "offset per channel" in recorded_explained(bench, DOWN, exact).cause


def test_a_direction_that_nothing_known_takes_away(bench_of, monkeypatch):
    """Nothing but the truth again, half of the gain, and twice of it is tried."""
    bench = bench_of("qwen3-tiny", torch.bfloat16)
    exact = torch.nn.functional.silu(bench.tap(GATE)) * bench.tap(UP)

    def tried(failure):
        for share in (0, 0.5, 2):
            yield Hypothesis(cause="not this", output=failure.expected * (1 + 0.004 * share))

    monkeypatch.setattr("harness.judge.explain.trial.direction.causes_of", lambda _kind: [tried])
    explanation = recorded_explained(bench, ACT, exact * 1.004)
    assert (explanation.cause, explanation.is_cause) == (NO_CAUSE, False)
    assert explanation.residual_after is None
