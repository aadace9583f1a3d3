"""Which of the causes is said: the likeliest, those that fit as well, or none."""

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.formats.taps import Kind, Operation
from harness.judge.explain.core.wrong_operation import Hypothesis
from harness.judge.explain.trial import ranking
from harness.judge.explain.trial.ranking import NO_CAUSE, rank_hypotheses

ROWS, WIDTH = 12, 32
UNIT = rounding_unit(torch.float32)


def random(seed):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXPECTED, WRONG = random(0), random(1)


class Wrong:
    """Rows that should be EXPECTED and are `actual`."""

    operation = Operation(tap="model.layers.0.self_attn.q_proj", kind=Kind.LINEAR)
    head_dim = 8
    positions = torch.zeros(ROWS, dtype=torch.int64)
    unrecorded, rerun = (), None

    def __init__(self, actual, dtype=torch.float32, expected=EXPECTED, bound=3.0):
        self.actual, self.expected, self.dtype = actual, expected, dtype
        self.roundings = (actual - expected).norm(dim=1) / expected.norm(dim=1) / rounding_unit(dtype)
        self.bound = torch.full((len(actual),), bound, dtype=torch.float64)
        self.num_elements, self.downstream = float(WIDTH), None


def explained(monkeypatch, *hypotheses, actual=WRONG, bound=3.0, dtype=torch.float32, generic=()):
    stages = [[lambda _wrong, outputs=outputs: iter(outputs)] for outputs in (hypotheses, generic)]
    monkeypatch.setattr(ranking, "stages_of", lambda _kind: stages)
    return rank_hypotheses(Wrong(actual, dtype, bound=bound), "every row")


def test_the_cause_under_which_the_error_goes_is_said_with_what_is_left(monkeypatch):
    noise = UNIT * random(2)
    explanation = explained(
        monkeypatch,
        Hypothesis(cause="no", output=random(3)),
        Hypothesis(cause="yes", output=WRONG + noise, detail="by much", num_fitted=2),
    )
    assert (explanation.cause, explanation.detail, explanation.scope, explanation.num_fitted) == (
        "yes",
        "by much",
        "every row",
        2,
    )
    assert explanation.is_cause
    assert (explanation.num_rows, explanation.num_explained) == (ROWS, ROWS)
    assert explanation.residual_before > 1e6
    assert 0.1 < explanation.residual_after < 3


def test_a_fitted_cause_with_the_rows_of_another_is_no_cause_of_its_own(monkeypatch):
    named = Hypothesis(cause="named", output=WRONG.clone())
    fitted = [Hypothesis(cause=name, output=WRONG.clone(), num_fitted=1) for name in ("fitted", "also fitted")]
    assert explained(monkeypatch, named, *fitted).cause == "named"
    assert explained(monkeypatch, *fitted).cause == "fitted, or also fitted", "two mechanisms with the same numbers"
    assert explained(monkeypatch, *fitted, generic=(named,)).is_cause


def test_a_fitted_number_that_follows_the_roundings_is_no_better_name(monkeypatch):
    named = Hypothesis(cause="named", output=WRONG * (1 + 1.5 * UNIT))
    fitted = Hypothesis(cause="fitted", output=WRONG * (1 + 0.6 * UNIT), num_fitted=1)
    assert explained(monkeypatch, named, fitted).cause == "named"
    elsewhere = Hypothesis(cause="elsewhere", output=WRONG.clone().index_fill(0, torch.arange(4), 3.0))
    assert explained(monkeypatch, elsewhere, fitted).cause == "fitted", "it does not explain as many rows"


def test_where_nothing_fits_that_is_said_with_what_was_seen(monkeypatch):
    explanation = explained(monkeypatch, Hypothesis(cause="no", output=random(3)))
    assert (explanation.cause, explanation.residual_after, explanation.num_explained, explanation.is_cause) == (
        NO_CAUSE,
        None,
        0,
        False,
    )
    assert explanation.detail.startswith("unrelated to what it should be")


def test_causes_that_fit_alike_are_all_said(monkeypatch):
    alike = [Hypothesis(cause=name, output=WRONG.clone()) for name in "abc"]
    assert explained(monkeypatch, *alike[:2]).cause == "a, or b"
    explanation = explained(monkeypatch, *alike)
    assert explanation.cause == "a, or b, or c"
    assert "give the same numbers: longer or other prompts" in explanation.detail
    assert explained(monkeypatch, *alike, Hypothesis(cause="d", output=WRONG)).cause == "a, or b, or c, or 1 others"


def test_what_would_tell_them_apart_is_said(monkeypatch):
    fine = rounding_unit(torch.float32)

    def detail(dtype, apart):
        output = WRONG * (1 + apart)
        pair = Hypothesis(cause="a", output=WRONG), Hypothesis(cause="b", output=output)
        return explained(monkeypatch, *pair, dtype=dtype).detail

    assert detail(torch.bfloat16, 200 * fine).endswith("a run in float32 would")
    assert detail(torch.bfloat16, 20 * fine).endswith("more of them would")
    assert detail(torch.float32, 0.0).endswith("longer or other prompts would")


def test_a_fit_that_is_not_asserted_is_described_where_no_cause_is_found(monkeypatch):
    explanation = explained(monkeypatch, Hypothesis(cause="seen", output=WRONG, is_cause=False))
    assert (explanation.cause, explanation.is_cause) == ("seen", False)


def test_fitted_numbers_do_not_win_against_better_ones_in_each_row(monkeypatch):
    near = Hypothesis(cause="one number", output=WRONG * (1 + 4 * UNIT), num_fitted=1)
    exact = Hypothesis(cause="one each", output=WRONG, num_fitted=ROWS, is_cause=False)
    explanation = explained(monkeypatch, near, exact)
    assert (explanation.cause, explanation.is_cause) == ("one each", False)
    assert explained(monkeypatch, near, exact, bound=4.5).cause == "one number", "what is left is rounding"
    assert explained(monkeypatch, Hypothesis(cause="none", output=WRONG * (1 + 2 * UNIT)), exact).cause == "none"


@pytest.mark.parametrize("num_rows", [2, ROWS // 2, ROWS - 3])
def test_some_rows_that_fit_are_too_few_to_say_it(monkeypatch, num_rows):
    some = random(3)
    some[:num_rows] = WRONG[:num_rows]
    explanation = explained(monkeypatch, Hypothesis(cause="some", output=some))
    assert (explanation.cause, explanation.is_cause) == (NO_CAUSE, False)
    assert explanation.detail.endswith(f"fits {num_rows} of {ROWS} rows, too few to assert it: some")


def test_an_explanation_that_raises_is_named_and_the_others_are_tried(monkeypatch):
    def fails(_wrong):
        raise IndexError("no such head")

    def refuses(_wrong):
        raise HarnessError(Code.STEP_ALTERED, "the file was altered")

    monkeypatch.setattr(ranking, "stages_of", lambda _kind: [[fails]])
    assert "could not be tried: fails: IndexError" in rank_hypotheses(Wrong(WRONG), "").detail
    monkeypatch.setattr(ranking, "stages_of", lambda _kind: [[refuses]])
    with pytest.raises(HarnessError, match="was altered"):
        rank_hypotheses(Wrong(WRONG), "")


def test_outputs_of_another_shape_are_no_explanation(monkeypatch):
    assert explained(monkeypatch, Hypothesis(cause="no", output=WRONG[:3])).cause == NO_CAUSE


def test_what_can_be_said_of_any_operation_waits_for_what_is_left(monkeypatch):
    generic = [Hypothesis(cause="generic", output=WRONG)]
    specific = Hypothesis(cause="own", output=WRONG)
    assert explained(monkeypatch, specific, generic=generic).cause == "own", "nothing is left to explain"
    fitted = Hypothesis(cause="own", output=WRONG, num_fitted=1)
    assert "generic" in explained(monkeypatch, fitted, generic=generic).cause


@pytest.mark.parametrize(("left", "cause"), [(1.0, "own"), (4.0, "generic")])
def test_where_no_rounding_is_allowed_two_may_be_left(monkeypatch, left, cause):
    output = WRONG + left * UNIT * WRONG.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(random(4), dim=1)
    right, generic = Hypothesis(cause="own", output=output), [Hypothesis(cause="generic", output=WRONG)]
    explanation = explained(monkeypatch, right, bound=0.0, generic=generic)
    assert explanation.cause == cause


@pytest.mark.parametrize(("left", "cause"), [(0.9, "own"), (1.1, "generic")])
def test_a_bound_below_one_rounding_leaves_one(monkeypatch, left, cause):
    output = WRONG + left * UNIT * WRONG.norm(dim=1, keepdim=True) * torch.nn.functional.normalize(random(4), dim=1)
    right, generic = Hypothesis(cause="own", output=output), [Hypothesis(cause="generic", output=WRONG)]
    assert explained(monkeypatch, right, bound=0.3, generic=generic).cause.startswith(cause)


def test_where_generic_causes_fit_best_those_alone_are_said(monkeypatch):
    """A fitted number leaves something to explain, and a cause without one does so at less cost."""
    fitted = Hypothesis(cause="own", output=WRONG, num_fitted=3)
    generic = [Hypothesis(cause=name, output=WRONG.clone()) for name in ("one", "other")]
    assert explained(monkeypatch, fitted, generic=generic).cause == "one, or other"
    later = [Hypothesis(cause=name, output=WRONG.clone(), num_fitted=3) for name in ("one", "other")]
    assert explained(monkeypatch, fitted, generic=later).cause == "own", "what is more general says the same, and less"
    fewer = [Hypothesis(cause=name, output=WRONG.clone(), num_fitted=2) for name in ("one", "other")]
    assert "one, or other" in explained(monkeypatch, fitted, generic=fewer).cause


@pytest.mark.parametrize("changes", [
    {"is_cause": True}, {"num_fitted": 0}, {"output": WRONG * (1 + 2 * UNIT)}, {"output": random(3)},
])  # fmt: skip
def test_numbers_of_each_row_beat_one_number_only_if_they_are_better_ones(monkeypatch, changes):
    near = Hypothesis(cause="one number", output=WRONG * (1 + 2 * UNIT), num_fitted=1)
    hypotheses = {"output": WRONG, "num_fitted": ROWS, "is_cause": False, **changes}
    explanation = explained(monkeypatch, near, Hypothesis(cause="one each", **hypotheses))
    assert explanation.cause.startswith("one each" if hypotheses["is_cause"] else "one number")


def test_numbers_of_each_row_that_only_a_few_rows_bear_out_beat_nothing(monkeypatch):
    few = random(3)
    few[: ROWS // 2 - 1] = WRONG[: ROWS // 2 - 1]
    near = Hypothesis(cause="one number", output=WRONG * (1 + 2 * UNIT), num_fitted=1)
    assert explained(monkeypatch, near, Hypothesis(cause="each", output=few, num_fitted=2, is_cause=False)).is_cause


def test_where_it_is_said_only_if_nothing_says_what(monkeypatch):
    where = Hypothesis(cause="where", output=WRONG, is_fallback=True)
    explanation = explained(monkeypatch, where)
    assert (explanation.cause, explanation.is_cause) == ("where", True)
    assert explained(monkeypatch, where, Hypothesis(cause="what", output=WRONG)).cause == "what"
    another = Hypothesis(cause="other", output=WRONG, is_fallback=True)
    assert explained(monkeypatch, where, another).cause == "where", "the first of them"


def test_rows_that_are_finite_are_explained_by_themselves(monkeypatch):
    class Finite(Wrong):
        def select(self, keep):
            return Finite(self.actual[keep], expected=self.expected[keep])

    actual = WRONG.clone()
    actual[1, 4] = torch.nan
    monkeypatch.setattr(ranking, "not_finite", lambda _wrong, _scope: "not finite")

    def ranked(output):
        hypothesis = Hypothesis(cause="yes", output=output[[0, *range(2, ROWS)]])
        monkeypatch.setattr(ranking, "stages_of", lambda _kind: [[lambda _wrong: iter([hypothesis])]])
        return rank_hypotheses(Finite(actual), "all")

    assert (ranked(WRONG).cause, ranked(WRONG).num_rows) == ("yes", ROWS - 1)
    assert ranked(random(5)) == "not finite"


def test_most_rows_are_85_in_a_hundred(monkeypatch):
    """Eleven of twelve are, ten are not."""
    for num_right in (11, 10):
        most = random(3)
        most[:num_right] = WRONG[:num_right]
        explanation = explained(monkeypatch, Hypothesis(cause="most", output=most))
        assert (explanation.is_cause, explanation.num_explained) == ((True, 11) if num_right == 11 else (False, 0))
