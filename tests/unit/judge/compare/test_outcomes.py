"""What the judgements are put together to: an outcome, near-ties, a convention that a whole engine follows; by hand."""

import pytest
import torch

from harness.errors import Code
from harness.judge.compare.run import _outcome, _own_logits_decide, _ties
from harness.results.check import Coverage, Finding, LogitResult, Outcome

from .judgements import errors_of, judgement, propagated_of

SOUND, BAD = (0.5, 1.0, 2.0, 0.1), (0.5, 9.0, 2.0, 0.1)


@pytest.mark.parametrize(
    ("judged", "follows"),
    [
        ([judgement(errors_of(SOUND, convention="some"), tap="lm_head")], True),
        ([judgement(errors_of(SOUND), tap="lm_head"), judgement(errors_of(SOUND, convention="some"))], True),
        ([judgement(errors_of(SOUND), tap="lm_head"), judgement(cache=errors_of(SOUND, convention="some"))], True),
        ([judgement(errors_of(SOUND), tap="lm_head"), judgement(errors_of(SOUND))], False),
        ([judgement(errors_of(SOUND), tap="lm_head"), judgement(errors_of(BAD, convention="some"))], False),
        ([judgement(errors_of(BAD), tap="lm_head"), judgement(errors_of(SOUND, convention="some"))], False),
        ([judgement(errors_of(SOUND, convention="some"))], False),
        ([judgement(cache=errors_of(SOUND, convention="some"), tap="lm_head")], False),
        ([judgement(errors_of(SOUND), tap="lm_head"), judgement(propagated=propagated_of([1.0] * 4))], False),
        ([], False),
    ],
)
def test_who_follows_another_convention_and_is_sound(judged, follows):
    assert _own_logits_decide(judged, "lm_head") == follows


@pytest.mark.parametrize("errors", [SOUND, BAD])
def test_the_logits_of_who_chose_other_experts_decide_if_all_is_sound(errors):
    judged = [judgement(errors_of(errors), tap="lm_head"), judgement(errors_of(SOUND))]
    assert _own_logits_decide(judged, "lm_head", has_other_choices=True) == (errors is SOUND)
    assert not _own_logits_decide(judged[1:], "lm_head", has_other_choices=True)


@pytest.mark.parametrize(("margin", "is_tie"), [(0.0, True), (1.0, True), (1.01, False), (0.7, True)])
def test_near_ties_are_within_two_errors_of_hfs_own(margin, is_tie):
    logits = LogitResult(num_rows=1, top1_agreement=1.0, kl_max=0.0, margin_min=margin)
    assert _ties(logits, torch.tensor([0.1, 0.5, 0.2])) == (("near_tie",) if is_tie else ())
    assert _ties(logits, None) == _ties(logits, torch.zeros(0)) == _ties(None, torch.ones(1)) == ()


@pytest.mark.parametrize(
    ("judged", "num_tokens", "outcome"),
    [
        ([judgement(errors_of(SOUND))], 0, Outcome.PASS),
        ([judgement(errors_of(SOUND), is_in_graph=False)], 0, Outcome.NOTHING),
        ([judgement(errors_of((), rows=()))], 0, Outcome.NOTHING),
        ([judgement(errors_of((), rows=())), judgement(errors_of(SOUND))], 0, Outcome.PASS),
        ([], 0, Outcome.NOTHING),
        ([], 1, Outcome.PASS),
    ],
)
def test_what_passes(judged, num_tokens, outcome):
    assert _outcome(judged, Coverage(), num_tokens, [], 0.5) is outcome
    assert _outcome(judged, Coverage(), num_tokens, [Finding(code=Code.NO_DECODE, message="")], 0.5) is Outcome.MISMATCH
