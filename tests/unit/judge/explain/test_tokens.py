"""Choices that are not the largest of their logits, in steps of a few rows of five words."""

from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code
from harness.judge.explain import tokens
from harness.judge.explain.tokens import explain_token

LOGITS = torch.tensor(
    [[1.0, 5.0, 3.0, 2.0, 4.0], [9.0, 1.0, 8.0, 7.0, 2.0], [0.0, 1.0, 2.0, 9.0, 5.0], [3.0, 2.5, 7.0, 1.0, 0.5]]
)
LARGEST, SECOND, SMALLEST, NEITHER = [1, 0, 3, 2], [4, 2, 4, 0], [0, 1, 0, 4], [3, 4, 1, 3]


class Step:
    """Rows of which those are sampled whose choice is not below zero."""

    phase, index = "decode", 0

    def __init__(self, sampled, logits=LOGITS, *, covered=None, request=0, first=0):
        count = len(logits) if covered is None else max(covered) + 1
        self.request, self.position = torch.full((count,), request), torch.arange(first, first + count)
        self.sampled = None if sampled is None else torch.tensor(sampled)
        self.logits, self.covered = logits, None if covered is None else torch.tensor(covered)

    def has(self, tap):
        return tap == "lm_head"

    def tap(self, tap):
        return self.logits

    def rows_of(self, tap):
        return self.covered


def explained(*steps, request=0, position=0, tap="lm_head"):
    return explain_token(SimpleNamespace(steps=list(steps)), tap, request, position)


@pytest.mark.parametrize(
    ("sampled", "cause"),
    [
        (SECOND, "the second largest logit is chosen"), (SMALLEST, "the smallest logit is chosen"),
        ([2, 2, 2, 2], "the token is chosen from the last row's logits"),
        ([0, 1, 1, 1], "the token is chosen from another row's logits"),
        ([3, 1, 1, 1], "the token is chosen from another row's logits"),
        (NEITHER, "the chosen token is not the largest logit: not greedy"),
        ([4, 2, 4, 3], "the chosen token is not the largest logit: not greedy"),
    ],
)  # fmt: skip
def test_choices(sampled, cause):
    explanation = explained(Step(sampled))
    assert explanation.cause == cause
    num_wrong = sum(one != another for one, another in zip(sampled, LARGEST, strict=True))
    assert (explanation.num_rows, explanation.num_explained) == (num_wrong, num_wrong)


def test_the_first_rows_logits():
    explanation = explained(Step([1, 1, 1, 1]), position=1)
    assert explanation.cause == "the token is chosen from the first row's logits"


def test_a_choice_of_the_largest_is_no_fault_of_the_choosing():
    assert explained(Step(LARGEST)) is None
    assert explained(Step([4, 0, 3, 2]), position=1) is None
    assert explained(Step(SECOND), position=9) is None
    assert explained(Step(SECOND), request=1) is None
    assert explained(Step(None)) is None
    assert explained(Step(SECOND), tap="logits") is None


def test_rows_that_are_not_sampled_are_no_choices():
    explanation = explained(Step([-1, 2, -1, -1]), position=1)
    assert (explanation.num_rows, explanation.scope) == (1, "request 0 position 1")
    assert explained(Step([-1, 2, -1, -1]), position=0) is None
    explanation = explained(Step([-1, 2, 0, -1]), position=2)
    assert explanation.num_rows == 2, "token 0 is one"


def test_logits_of_the_sampled_rows_alone():
    step = Step([-1, 4, -1, 2], LOGITS[:2], covered=[1, 3])
    explanation = explained(step, position=3)
    assert explanation.cause == "the second largest logit is chosen"
    assert explanation.scope == "2 choices: request 0 position 1, request 0 position 3"


def test_the_rank_and_the_distance():
    assert explained(Step([3, 0, 3, 2])).detail == "token 3 has rank 4, 3 below the largest logit"
    assert explained(Step(SECOND), position=3).detail == "token 0 has rank 2, 4 below the largest logit"
    assert explained(Step([5, 0, 3, 2])).detail == "token 5 is not in the vocabulary"


def test_places_of_several_steps_are_listed_up_to_the_third():
    explanation = explained(Step(SECOND, request=3), Step(SECOND, request=1, first=4), request=1, position=6)
    assert explanation.scope == "8 choices: request 3 position 0, request 3 position 1, request 3 position 2"
    assert explained(Step([-1, 2, -1, -1]), Step([4, -1, -1, -1], request=1), position=1).scope.startswith("2 choices")


def test_choices_that_only_some_of_have_one_cause():
    explanation = explained(Step([4, 2, 4, 4]))
    assert explanation.cause == "the chosen token is not the largest logit: not greedy"


@pytest.mark.parametrize(("name", "step"), [("bfloat16", 2.0**-8), ("float16", 2.0**-11)])
def test_ties_in_16_bits(name, step):
    logits = torch.tensor([[1.0, 1.0 + step, 0.0, -1.0], [1.0 + step, 0.0, 1.0, -1.0]])
    explanation = explained(Step([0, 2], logits))
    assert explanation.cause in (f"the logits are rounded to {half} before the argmax" for half in ("bfloat16", name))
    far = torch.tensor([[1.0, 1.05, 0.0, -1.0], [1.05, 0.0, 1.0, -1.0]])
    assert "rounded" not in explained(Step([0, 2], far)).cause
    assert "rounded" not in explained(Step([4, 2], logits)).cause


def test_steps_are_looked_at_up_to_a_number(monkeypatch):
    steps = [Step(SECOND, request=number) for number in range(3)]
    for most, is_seen in ((3, True), (2, False)):
        monkeypatch.setattr(tokens, "_MAX_STEPS", most)
        assert (explained(*steps, request=2) is not None) == is_seen


# In a recording of the reference engine.


def recorded_explained(bench, choose):
    """The explanation where each step's choices are those of `choose`, from its logits [rows, V]."""
    parts = {}
    for step in bench.steps("lm_head"):
        sampled = step.sampled.clone()
        at = (sampled >= 0).nonzero()[:, 0]
        sampled[at] = choose(step.tap("lm_head"))
        parts[step.index] = {"sampled": sampled}
    recording = bench.replaced(parts)
    return bench.explained(recording, "lm_head", Code.TOKENS_DIFFER, request=1, position=12)


def test_choices_in_a_recording(bench):
    explanation = recorded_explained(bench, lambda logits: logits.topk(2).indices[:, 1])
    assert explanation.cause == "the second largest logit is chosen"
    assert "has rank 2" in explanation.detail
    assert explanation.scope == "10 choices: request 0 position 36, request 1 position 10, request 0 position 37"
    assert recorded_explained(bench, lambda logits: logits.argmin(1)).cause == "the smallest logit is chosen"
    assert recorded_explained(bench, lambda logits: logits.topk(9).indices[:, 7]).cause.endswith("not greedy")


def test_one_wrong_choice_is_named_by_its_place(bench):
    here = lambda step: (step.request == 1) & (step.position == 12)  # noqa: E731
    step = next(item for item in bench.steps("lm_head") if bool(here(item).any()))
    row, covered = int(here(step).nonzero()[0, 0]), step.rows_of("lm_head")
    at = row if covered is None else covered.tolist().index(row)
    sampled = step.sampled.clone()
    sampled[row] = step.tap("lm_head")[at].argmin()
    explanation = bench.explained(
        bench.replaced({step.index: {"sampled": sampled}}), "lm_head", Code.TOKENS_DIFFER, request=1, position=12
    )
    assert (explanation.scope, explanation.num_rows) == ("request 1 position 12", 1)


def test_a_choice_that_follows_from_the_logits_is_no_mistake_of_choosing(bench):
    assert recorded_explained(bench, lambda logits: logits.argmax(1)) is None
