"""Choices of the engine against those of the truth: equal, tied within the noise, or wrong."""

import pytest
import torch

from harness.compare import TOKENS
from harness.errors import Code
from harness.oracle.golden import LOGIT_NOISE

from .conftest import LENGTHS, NUM_NEW
from .recordings import Copy

ROW = (1, LENGTHS[1])


@pytest.fixture
def one(bench):
    return bench()


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
def test_a_choice_below_the_best_by_twice_the_noise_is_a_tie(one, tmp_path, share, is_tie):
    token, margin = second_best(one)
    actual = one.recorded()
    choose(actual, token)
    result = one.measure(actual.write(tmp_path / "r"), noise=with_noise(one, share * margin))
    assert result.tokens.ties == int(is_tie)
    assert result.tokens.equal == result.tokens.compared - 1
    assert differing(result) == ([] if is_tie else [ROW])


def test_without_noise_nothing_is_a_tie(one, tmp_path):
    token, _ = second_best(one)
    actual = one.recorded()
    choose(actual, token)
    result = one.measure(actual.write(tmp_path / "r"), noise={})
    assert result.tokens.ties == 0
    assert differing(result) == [ROW]


def test_the_finding_names_both_tokens(one, tmp_path):
    token, _ = second_best(one)
    actual = one.recorded()
    expected = sampled_row(actual)[0].sampled[sampled_row(actual)[1]]
    choose(actual, token)
    (finding,) = one.measure(actual.write(tmp_path / "r")).findings
    assert f"chose token {token} after position {ROW[1]}, expected {expected}" in finding.message


@pytest.mark.parametrize("token", [256, 2**40])
def test_a_token_outside_of_the_vocabulary_is_never_a_tie(one, tmp_path, token):
    actual = one.recorded()
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
