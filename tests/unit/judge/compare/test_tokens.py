"""Choices of the engine against those of the truth: equal, tied within the noise, or wrong."""

import math
import random

import pytest
import torch

from harness.errors import Code
from harness.judge.compare import TOKENS, tokens
from harness.judge.compare.align import Locator
from harness.judge.compare.tokens import compare_tokens
from harness.oracle.golden import LOGIT_NOISE

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
    own = {row: [generator.randint(0, 4) for _ in range(VOCABULARY)] for row in EVERY if generator.random() < 0.8}
    steps, chosen = [], []
    for _ in range(3):
        rows = generator.sample(EVERY, 4)
        sampled = [generator.choice([-1, *range(VOCABULARY + 2)]) for _ in rows]
        taps = {"logits": torch.tensor([own.get(row, [0] * VOCABULARY) for row in rows], dtype=torch.float32)}
        here = [at for at, row in enumerate(rows) if row in own]
        taps["logits"] = taps["logits"][here]
        steps.append(Step(rows, sampled=sampled, taps=taps if here else {}, rows_of={"logits": here}))
        chosen += [(row, token) for row, token in zip(rows, sampled, strict=True) if token >= 0 and row in golden]
    steps.append(Step(EVERY[:2], phase="decode"))
    known = list(golden)
    expected = Step(known, taps={"logits": torch.tensor(list(golden.values()), dtype=torch.float32)})
    return steps, expected, chosen, golden, own


@pytest.mark.parametrize("is_sound", [False, True])
@pytest.mark.parametrize("block", [1, 3, 256])
@pytest.mark.parametrize("seed", range(6))
def test_choices_are_counted_as_a_loop_counts_them(monkeypatch, seed, block, is_sound):
    monkeypatch.setattr(tokens, "_BLOCK_ROWS", block)
    steps, expected, chosen, golden, own = drawn(seed)
    threshold, equal, ties, wrong = 2.0, 0, 0, []
    for row, token in chosen:
        margin = max(golden[row]) - golden[row][token] if token < VOCABULARY else math.inf
        if margin == 0:
            equal += 1
        elif margin <= threshold or (
            is_sound and row in own and token < VOCABULARY and own[row][token] == max(own[row])
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
