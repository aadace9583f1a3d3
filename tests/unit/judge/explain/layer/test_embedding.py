"""Rows of the embedding's table that are those of other tokens, and what they have in common."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind, Operation
from harness.judge.explain.layer import embedding

from ..toys import ToyModel, by_cause, failure_of, named, random, recorded

TAP = "model.embed_tokens"
OPERATION = Operation(tap=TAP, kind=Kind.EMBEDDING, source=TAP)
TABLE = random(40, 6, seed=1)
TOKENS = ([5, 9, 30, 7, 12, 3], [20, 11, 2, 33])
STEPS = ([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], [(1, 2), (0, 3)], [(0, 4)], [(0, 5)])
PLACES = [place for step in STEPS for place in step]
STEP = {place: at for at, step in enumerate(STEPS) for place in step}


@pytest.fixture
def of(tmp_path):
    def make(token, places, *, meant=lambda r, p: TOKENS[r][p], noise=0.0, dtype=torch.float32, ahead=0):
        """Rows at `places` that are those of `token` instead of those of `meant`."""
        steps = []
        for step in STEPS:
            taps = {"x": torch.zeros(len(step), 1)}
            steps.append({"request": [r for r, _ in step], "position": [p for _, p in step], "taps": taps})
        folder = tmp_path / f"r{len(list(tmp_path.iterdir()))}"
        recording = recorded(folder, steps, lengths=((6, 3), (4, 2)), tokens=TOKENS)
        module = nn.Embedding(*TABLE.shape, dtype=torch.float64)
        module.weight.data = TABLE
        tokens = torch.tensor([meant(r, p) for r, p in places])
        actual = TABLE[torch.tensor([token(*place) for place in places])] + noise
        operation = replace(OPERATION, tokens_ahead=ahead)
        return failure_of(
            operation, actual, TABLE[tokens], tokens, model=ToyModel(OPERATION, modules={TAP: module}),
            recording=recording, dtype=dtype, request=[r for r, _ in places], position=[p for _, p in places],
            step=[STEP[place] for place in places],
        )  # fmt: skip

    return make


def before_in_step(r, p):
    step = STEPS[STEP[r, p]]
    another = step[step.index((r, p)) - 1]
    return TOKENS[another[0]][another[1]]


THE = "the embedding is that of "


@pytest.mark.parametrize(
    ("token", "places", "cause"),
    [
        (lambda r, p: TOKENS[r][p - 1], [(0, 1), (0, 4), (1, 2)], "the token before it"),
        (lambda r, p: TOKENS[r][p + 1], [(0, 0), (0, 4), (1, 2)], "the token after it"),
        (before_in_step, [(0, 1), (1, 0), (0, 3)], "the token before it in the step"),
        (before_in_step, [(0, 0), (0, 3)], "another token"),  # before the first row of the step there is none
        (lambda r, p: TOKENS[r][p] + 1, PLACES, "token id +1"),
        (lambda r, p: TOKENS[r][p] - 2, PLACES, "token id -2"),
        (lambda r, p: (TOKENS[r][p] * 3) % 40, PLACES, "another token"),
        (lambda r, p: 1, [(0, 0), (0, 5)], "another token"),  # nothing is before the first, or after the last
        (lambda r, p: 0, [(1, 3 - 1)], "token id -2"),
    ],
)
def test_rows_of_other_tokens(of, token, places, cause):
    failure = of(token, places, noise=1e-9)
    (hypothesis,) = by_cause(embedding.another_token, failure).values()
    assert hypothesis.cause == THE + cause
    assert torch.equal(hypothesis.output, TABLE[torch.tensor([token(*place) for place in places])])
    shown = ", ".join(f"{token(r, p)} for {TOKENS[r][p]}" for r, p in places[:6])
    assert hypothesis.detail == f"rows of the table: {shown}"


@pytest.mark.parametrize(("shift", "cause"), [(0, "the token before it"), (2, "the token after it")])
def test_rows_that_look_ahead_are_held_to_the_tokens_there(of, shift, cause):
    def ahead(by):
        return lambda r, p: TOKENS[r][p + by]

    failure = of(ahead(shift), [(0, 0), (0, 3), (1, 1)], meant=ahead(1), ahead=1)
    (hypothesis,) = by_cause(embedding.another_token, failure).values()
    assert hypothesis.cause == THE + cause


@pytest.mark.parametrize(
    ("position", "cause"),
    [
        (lambda p: min(p, 3) + 2, "another position"),
        (lambda p: p + 1, "another position (-1)"),
        (lambda p: p + 2, None),
    ],
)
def test_rows_of_other_positions(of, position, cause):
    """OPT's table of learned positions has two rows before the first."""
    failure = of(lambda r, p: position(p), [(0, 4), (0, 5)], meant=lambda r, p: p + 2)
    hypotheses = by_cause(embedding.another_token, failure)
    assert list(hypotheses) == ([] if cause is None else [THE + cause])
    assert [item.detail for item in hypotheses.values()] == (
        [] if cause is None else [f"rows of the table: {position(4)} for 6, {position(5)} for 7"]
    )


def test_the_right_rows_are_no_other_tokens(of):
    """An embedding that is not scaled is nearest to its own row."""
    assert by_cause(embedding.another_token, of(lambda r, p: TOKENS[r][p], PLACES, noise=1e-3)) == {}


def test_a_large_table_is_searched_in_parts(of, monkeypatch):
    monkeypatch.setattr(embedding, "_BLOCK_ROWS", 7)
    failure = of(lambda r, p: TOKENS[r][p] + 1, PLACES)
    assert list(by_cause(embedding.another_token, failure)) == [f"{THE}token id +1"]


def test_rows_that_are_not_finite_and_tables_that_are_not_held_are_not_matched(of):
    assert by_cause(embedding.another_token, of(lambda r, p: 1, PLACES, noise=torch.nan)) == {}
    failure = of(lambda r, p: 1, PLACES)
    failure.hf.modules[TAP] = nn.Identity()
    assert by_cause(embedding.another_token, failure) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_root_of_the_width(of, dtype):
    failure = of(lambda r, p: TOKENS[r][p], PLACES, dtype=dtype)
    exact, rounded = embedding.scaled(failure)
    assert exact.cause == rounded.cause == "the embedding is scaled by the root of the hidden size"
    torch.testing.assert_close(exact.output, failure.expected * 6**0.5)
    torch.testing.assert_close(rounded.output, failure.expected * float(torch.tensor(6**0.5).to(dtype)))


def test_what_the_trial_names(of):
    after = of(lambda r, p: TOKENS[r][p - 1], [(0, 1), (0, 4), (1, 2)])
    assert named(after).cause == f"{THE}the token before it"
    right = of(lambda r, p: TOKENS[r][p], PLACES)
    cause = "the embedding is scaled by the root of the hidden size"
    assert named(of_rows(right, right.expected * 6**0.5)).cause == cause
    assert named(of_rows(right, right.expected * 0)).cause.startswith("the output is zero")


def of_rows(failure, actual):
    error = (actual - failure.expected).norm(dim=1) / failure.expected.norm(dim=1)
    return replace(failure, actual=actual, roundings=error / rounding_unit(failure.dtype))
