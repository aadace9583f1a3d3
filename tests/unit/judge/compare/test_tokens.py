"""Greedy choices and the drafts that they accept, with the ties of the truth's logits."""

import math
import random
from dataclasses import replace

import pytest
import torch

import harness
from harness.errors import Code
from harness.formats.recording import RequestInfo
from harness.judge.compare import TOKENS, tokens
from harness.judge.compare.align import Locator
from harness.judge.compare.tokens import compare_acceptance, compare_tokens
from harness.oracle.golden import LOGIT_NOISE
from harness.report.check.sentences import facts

from .conftest import LENGTHS, NUM_NEW
from .in_memory import Step, recording_of
from .recordings import Copy

ROW = (1, LENGTHS[1])


def sampled_row(actual, at=ROW):
    for step in actual.computing():
        row = step.row(*at)
        if row is not None and step.sampled is not None and step.sampled[row] >= 0:
            return step, row
    raise AssertionError(at)


def choose(actual, token):
    step, row = sampled_row(actual)
    step.sampled[row] = token


def second_best(one):
    """The truth's second choice at the row, and how far below the best it is."""
    logits = Copy.of(one.golden.recording).at("lm_head", *ROW)
    best, second = logits.topk(2)[0].tolist()
    return int(logits.topk(2)[1][1]), best - second


def differing(result):
    return [(f.request, f.position) for f in result.findings if f.code is Code.TOKENS_DIFFER]


def with_noise(one, logit_noise):
    """The golden's noise, but for that of the logits, at some other row."""
    noise = dict(one.golden.noise)
    noise[LOGIT_NOISE] = torch.zeros_like(noise[LOGIT_NOISE])
    noise[LOGIT_NOISE][0] = logit_noise
    return noise


@pytest.mark.parametrize("schedule", ["plain", "batched"])
def test_equal_choices(one, tmp_path, schedule):
    tokens = one.measure(one.recorded(schedule).write(tmp_path / "r")).tokens
    assert (tokens.compared, tokens.equal, tokens.ties) == (len(LENGTHS) * NUM_NEW, len(LENGTHS) * NUM_NEW, 0)


@pytest.mark.parametrize(("share", "is_tie"), [(0.51, True), (0.49, False)])
def test_a_choice_below_the_best_by_twice_the_noise_is_a_tie(one, actual, tmp_path, share, is_tie):
    token, margin = second_best(one)
    choose(actual, token)
    result = one.measure(actual.write(tmp_path / "r"), noise=with_noise(one, share * margin))
    assert result.tokens.ties == int(is_tie)
    assert result.tokens.equal == result.tokens.compared - 1
    assert differing(result) == ([] if is_tie else [ROW])


def test_without_noise_nothing_is_a_tie(one, actual, tmp_path):
    token, _ = second_best(one)
    choose(actual, token)
    result = one.measure(actual.write(tmp_path / "r"), noise={})
    assert result.tokens.ties == 0
    assert differing(result) == [ROW]


def test_the_finding_names_both_tokens(one, actual, tmp_path):
    token, _ = second_best(one)
    expected = sampled_row(actual)[0].sampled[sampled_row(actual)[1]]
    choose(actual, token)
    (finding,) = one.measure(actual.write(tmp_path / "r")).findings
    assert f"chose token {token} after position {ROW[1]}, expected {expected}" in finding.message


@pytest.mark.parametrize("token", [256, 2**40])
def test_a_token_outside_of_the_vocabulary_is_never_a_tie(one, actual, tmp_path, token):
    choose(actual, token)
    result = one.measure(actual.write(tmp_path / "r"), noise=with_noise(one, 1e9))
    assert differing(result) == [ROW]
    assert result.tokens.ties == 0


def test_a_choice_where_the_truth_is_not_finite(one, tmp_path):
    expected = Copy.of(one.golden.recording)
    expected.at("lm_head", *ROW)[7] = torch.nan
    result = one.measure(one.recorded().write(tmp_path / "a"), expected=expected.write(tmp_path / "e"))
    assert differing(result) == [ROW]
    assert result.tokens.equal == result.tokens.compared - 1


def test_choices_that_were_never_reported(one, tmp_path):
    actual, num_choices = one.recorded(), len(LENGTHS) * NUM_NEW
    step, row = sampled_row(actual)
    step.sampled[row] = -1
    (finding,) = one.measure(actual.write(tmp_path / "a")).findings
    assert finding.code is Code.ROWS_MISSING
    assert f"{num_choices - 1} of {num_choices}" in finding.message
    for step in actual.steps:
        step.sampled = None
    recording = actual.write(tmp_path / "b")
    assert [finding.code for finding in one.measure(recording).findings] == [Code.ROWS_MISSING]
    assert one.measure(recording, not_offered=[TOKENS]).findings == ()


# On logits by hand, against a loop over the rows.

VOCABULARY, REQUESTS = 6, {7: (1, 2, 3, 4), 2: (5, 6, 7), 9: (8, 9)}
EVERY = [(request, at) for request, ids in REQUESTS.items() for at in range(len(ids))]


def drawn(seed):
    """An engine's steps with its choices, and a golden's logits of some rows; logits are small integers."""
    generator = random.Random(seed)
    golden = {row: [generator.randint(0, 4) for _ in range(VOCABULARY)] for row in EVERY if generator.random() < 0.8}
    own_logits = {
        row: [generator.randint(0, 4) for _ in range(VOCABULARY)] for row in EVERY if generator.random() < 0.8
    }
    steps, chosen = [], []
    for _ in range(3):
        rows = generator.sample(EVERY, 4)
        sampled = [generator.choice([-1, *range(VOCABULARY + 2)]) for _ in rows]
        taps = {"logits": torch.tensor([own_logits.get(row, [0] * VOCABULARY) for row in rows], dtype=torch.float32)}
        here = [at for at, row in enumerate(rows) if row in own_logits]
        taps["logits"] = taps["logits"][here]
        steps.append(Step(rows, sampled=sampled, taps=taps if here else {}, rows_of={"logits": here}))
        chosen += [(row, token) for row, token in zip(rows, sampled, strict=True) if token >= 0 and row in golden]
    steps.append(Step(EVERY[:2], phase="decode"))
    known = list(golden)
    expected = Step(known, taps={"logits": torch.tensor(list(golden.values()), dtype=torch.float32)})
    return steps, expected, chosen, golden, own_logits


@pytest.mark.parametrize("is_sound", [False, True])
@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("seed", range(6))
def test_choices_are_counted_as_a_loop_counts_them(monkeypatch, seed, block, is_sound):
    monkeypatch.setattr(tokens, "_BLOCK_ROWS", block)
    steps, expected, chosen, golden, own_logits = drawn(seed)
    threshold, equal, ties, wrong = 2.0, 0, 0, []
    for row, token in chosen:
        margin = max(golden[row]) - golden[row][token] if token < VOCABULARY else math.inf
        if margin == 0:
            equal += 1
        elif margin <= threshold or (
            is_sound and row in own_logits and token < VOCABULARY and own_logits[row][token] == max(own_logits[row])
        ):
            ties += 1
        else:
            wrong.append((row, token, margin))
    actual = recording_of(REQUESTS, steps)
    result, findings = compare_tokens(
        actual, Locator(recording_of(REQUESTS, [expected])), "logits", torch.tensor([0.3, 1.0, 0.0]),
        sound=Locator(actual) if is_sound else None,
    )  # fmt: skip
    assert (result.compared, result.equal, result.ties) == (len(chosen), equal, ties)
    assert [((item.request, item.position), item.tap, item.code) for item in findings] == [
        (row, "logits", Code.TOKENS_DIFFER) for row, _, _ in wrong
    ]
    for finding, ((request, position), token, margin) in zip(findings, wrong, strict=True):
        best = golden[request, position].index(max(golden[request, position]))
        assert finding.message == (
            f"request {request} chose token {token} after position {position}, expected {best}: "
            f"its logit is {margin:.3g} below the best, noise allows 2"
        )


@pytest.mark.parametrize("noise", [None, torch.zeros(0)])
def test_without_noise_or_choices(noise):
    golden = Locator(recording_of(REQUESTS, [Step(EVERY[:1], taps={"logits": torch.tensor([[1.0, 2.0]])})]))
    for sampled, compared, num_wrong in (([0], 1, 1), ([1], 1, 0), ([-1], 0, 0), (None, 0, 0)):
        actual = recording_of(REQUESTS, [Step(EVERY[:1], sampled=sampled)])
        result, findings = compare_tokens(actual, golden, "logits", noise)
        assert (result.compared, len(findings)) == (compared, num_wrong)


TOKEN_IDS, PROMPT = (9, 8, 7, 6, 5, 4), 2
VOCAB, LOGITS = 12, "lm_head"


def golden(changes=()):
    """HF's logits choose the request's own tokens by 1.0; `changes` are (position, token, logit)."""
    logits = torch.zeros(len(TOKEN_IDS), VOCAB)
    for position, token in enumerate(TOKEN_IDS[1:]):
        logits[position, token] = 1.0
    for position, token, value in changes:
        logits[position, token] = value
    step = Step([(0, at) for at in range(len(TOKEN_IDS))], taps={LOGITS: logits})
    return Locator(recording_of({0: TOKEN_IDS}, [step], prompt_length=PROMPT))


def engine(sampled=(7, 6, 5, 11), rows=((0, 2), (0, 3), (1, 4), (1, 5)), phase="decode"):
    """A step of position 2 with the drafts 6, 3 and 1: the first is the request's own, and 3 is rejected."""

    recording = recording_of(
        {0: TOKEN_IDS}, [Step(list(rows), phase=phase, sampled=list(sampled))], prompt_length=PROMPT
    )
    draft = RequestInfo(id=1, token_ids=[*TOKEN_IDS[:4], 3, 1], prompt_length=4, draft_of=0)
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
    numbers = f"{accepted} of {drafts} drafts in {len(run.acceptance)} steps, by HF's logits {accepted}"
    assert said == f"{numbers}; by greedy choices; an engine's own rule of acceptance is not asked"


def test_the_report_names_steps_that_accept_another_number(checked):
    (run,) = checked.runs
    first = replace(run.acceptance[0], num_accepted=1, truth_least=2, truth_most=3)
    said = dict(facts(replace(checked, runs=(replace(run, acceptance=(first,)),))))["acceptance"]
    assert said == (
        f"1 of {first.num_drafts} drafts in 1 step, by HF's logits 2 to 3 (ties within rounding); another number in 1 "
        f"step: 1 for 2 to 3 at request 0, position {first.position}, step {first.step}; "
        "by greedy choices; an engine's own rule of acceptance is not asked"
    )
