"""Drafts that are accepted: by the engine's choices, and by the truth's logits with its ties."""

from dataclasses import replace

import pytest
import torch

import harness
from harness.formats.recording import RequestInfo
from harness.judge.compare.align import Locator
from harness.judge.compare.tokens import compare_acceptance
from harness.report.check.sentences import facts

from .in_memory import Step, recording_of

TOKENS, PROMPT = (9, 8, 7, 6, 5, 4), 2
VOCAB, LOGITS = 12, "lm_head"


def golden(changes=()):
    """HF's logits choose the request's own tokens by 1.0; `changes` are (position, token, logit)."""
    logits = torch.zeros(len(TOKENS), VOCAB)
    for position, token in enumerate(TOKENS[1:]):
        logits[position, token] = 1.0
    for position, token, value in changes:
        logits[position, token] = value
    step = Step([(0, at) for at in range(len(TOKENS))], taps={LOGITS: logits})
    return Locator(recording_of({0: TOKENS}, [step], prompt_length=PROMPT))


def engine(sampled=(7, 6, 5, 11), rows=((0, 2), (0, 3), (1, 4), (1, 5)), phase="decode"):
    """A step of position 2 with the drafts 6, 3 and 1: the first is the request's own, and 3 is rejected."""

    recording = recording_of({0: TOKENS}, [Step(list(rows), phase=phase, sampled=list(sampled))], prompt_length=PROMPT)
    draft = RequestInfo(id=1, token_ids=[*TOKENS[:4], 3, 1], prompt_length=4, draft_of=0)
    recording.manifest.requests.append(draft)
    return recording


def verified(actual, expected=None, threshold=0.0):
    return compare_acceptance(actual, expected or golden(), LOGITS, threshold)


def counts(actual, expected=None, threshold=0.0):
    (step,) = verified(actual, expected, threshold)
    return step.num_drafts, step.num_accepted, (step.truth_least, step.truth_most), step.differs


SOUND = (6, 5, 4, 11)


def test_the_engine_and_the_truth_accept_what_they_choose():
    (step,) = verified(engine(SOUND))
    assert (step.step, step.request, step.position) == (0, 0, 2)
    assert counts(engine(SOUND)) == (3, 1, (1, 1), False)


@pytest.mark.parametrize(
    ("sampled", "num_accepted"), [((2, 5, 4, 11), 0), ((6, 3, 4, 11), 2), ((6, 3, 1, 11), 3), ((2, 3, 1, 11), 0)]
)
def test_another_choice_accepts_another_number(sampled, num_accepted):
    assert counts(engine(sampled)) == (3, num_accepted, (1, 1), num_accepted != 1)


def test_a_tie_may_be_accepted_or_not():
    expected = golden([(2, 2, 0.95)])  # 6 is best by 0.05
    assert counts(engine(SOUND), expected, 0.1) == (3, 1, (0, 1), False)
    assert counts(engine((2, 5, 4, 11)), expected, 0.1) == (3, 0, (0, 1), False)
    assert counts(engine((2, 5, 4, 11)), expected, 0.01) == (3, 0, (1, 1), True)


def test_a_rejected_draft_that_is_tied_may_be_accepted():
    assert counts(engine((6, 3, 4, 11)), golden([(3, 3, 0.95)]), 0.1) == (3, 2, (1, 2), False)


def test_the_truth_ends_where_its_rows_do():
    (step,) = verified(engine((6, 3, 1, 11)), golden([(3, 3, 2.0)]))
    assert (step.truth_least, step.truth_most) == (2, 2)  # what follows the rejected draft is not in the golden


@pytest.mark.parametrize(
    "actual",
    [
        engine(SOUND, rows=((0, 0), (0, 1), (0, 2), (0, 3))),  # a prompt
        engine((-1, -1, -1, 11), rows=((0, 2), (0, 3), (0, 4), (0, 5))),  # computed again, to choose the last
        engine((6,), rows=((0, 2),)),  # one token
        engine(SOUND, phase="readback"),
        engine(SOUND, rows=((1, 4), (1, 5), (1, 4), (1, 5))),  # nothing but a draft, which is taken back
    ],
)
def test_what_verifies_no_drafts_is_left_out(actual):
    assert verified(actual) == ()


@pytest.fixture(scope="module")
def checked(checkpoints):
    return harness.check(
        "reference", model=checkpoints / "qwen3-tiny", prompts=[[5, 9, 14, 3, 8, 21, 4]], max_new_tokens=14,
        schedules=["speculative"], dtype="float32",
    )  # fmt: skip


def test_a_run_is_reported_by_step(checked):
    (run,) = checked.runs
    assert len(run.acceptance) > 2
    assert {step.num_drafts for step in run.acceptance} >= {3}
    assert all(step.num_accepted == step.truth_least == step.truth_most for step in run.acceptance)
    said = dict(facts(checked))["acceptance"]
    accepted, drafts = (sum(getattr(item, name) for item in run.acceptance) for name in ("num_accepted", "num_drafts"))
    assert said == f"{accepted} of {drafts} drafts in {len(run.acceptance)} steps, by HF's logits {accepted}"


def test_steps_that_accept_another_number_are_said(checked):
    (run,) = checked.runs
    first = replace(run.acceptance[0], num_accepted=1, truth_least=2, truth_most=3)
    said = dict(facts(replace(checked, runs=(replace(run, acceptance=(first,)),))))["acceptance"]
    assert said == (
        f"1 of {first.num_drafts} drafts in 1 step, by HF's logits 2 to 3 (ties within rounding); another number in 1 "
        f"step: 1 for 2 to 3 at request 0, position {first.position}, step {first.step}"
    )
