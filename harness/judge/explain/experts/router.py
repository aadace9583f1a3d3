"""A router's choice is wrong; and the choice among earlier tokens, as sparse attention makes it.

Mistakes of scores, biases and groups are changes of HF's code.

`R` rows, `E` experts, `C` chosen experts or positions of a row, the best first.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import is_readback
from harness.judge.explain.core.formats import HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, gathered
from harness.results.check import Explanation

_NEARLY_ALL = 0.9
"""Share of the rows that a cause must explain: no rounding turns one choice into another, and some agree by chance."""


def explain_count(operation: Operation, recording: Recording) -> Explanation | None:
    """Explain a choice of too few or too many experts, which has no expected counterpart; None for other operations."""
    entry = next((entry for entry in recording.manifest.taps if entry.name == operation.tap), None)
    if operation.kind is not Kind.CHOICE or entry is None:
        return None
    actual, expected = prod(entry.shape), prod(operation.shape)
    return Explanation(
        cause=f"wrong top-k: a row has {actual} chosen experts, and should have {expected}",
        scope="all rows",
    )


def other_choice(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The indices are those of other scores, or not of the best ones.

    Causes: the experts with the lowest scores are chosen; the choice begins at the second; the best expert is chosen
    for every place; every row is sent to the same experts; the numbers of the experts are one too high or low; the
    experts are chosen by scores in *dtype*; the experts are those of another row, one position away; wrong top-k: a row
    has *n* chosen experts, and should have *n*.
    """
    if wrong.operation.among_tokens or not wrong.operation.inputs:  # no experts, or nothing that they are chosen by
        return
    scores, count = wrong.inputs[0].flatten(1), wrong.expected.shape[1]
    if _is_one_choice(wrong):
        yield choice(wrong, "every row is sent to the same experts", wrong.actual[:1].long().expand(len(scores), -1))
    if scores.shape[1] == 2:  # one of two groups: a wrong row has the other one, whatever the mistake
        return
    order = scores.argsort(dim=1, descending=True)
    best = order[:, :count]
    yield choice(wrong, "the experts with the lowest scores are chosen", order.flip(1)[:, :count])
    if order.shape[1] > count:
        yield choice(wrong, "the best expert is passed over: the choice begins at the second", order[:, 1 : count + 1])
    yield choice(wrong, "the best expert is chosen for every place", order[:, :1].expand(-1, count))
    yield choice(wrong, "the numbers of the experts are one too high", best + 1)
    yield choice(wrong, "the numbers of the experts are one too low", best - 1)
    for dtype in HALF_DTYPES:
        coarse = rounded(scores, dtype).argsort(dim=1, descending=True, stable=True)[:, :count]
        yield choice(wrong, f"the experts are chosen by scores in {name_of(dtype)}", coarse)
    for shift in (-1, 1):
        there = replace(wrong.rows, position=(wrong.positions + shift).clamp(min=0))
        theirs = gathered(wrong.locator, wrong.operation.inputs[0], there)
        if theirs is not None:
            cause = f"the experts are those of another row, {shift:+d} positions away"
            yield choice(wrong, cause, theirs.topk(count).indices)


def _is_one_choice(wrong: WrongOperation) -> bool:
    """Whether all recorded rows, including the right ones, have the same experts."""
    tap = wrong.operation.tap
    steps = [step for step in wrong.recording.steps if not is_readback(step) and step.has(tap)]
    recorded = torch.cat([step.tap(tap).flatten(1) for step in steps]).sort(dim=1).values
    return len(recorded.unique(dim=0)) == 1


def choice(wrong: WrongOperation, cause: str, chosen: torch.Tensor) -> Hypothesis:
    """Return a hypothesis about indices [R, C], in any order."""
    is_same = are_chosen_alike(chosen, wrong.actual)[:, None]
    return Hypothesis(
        cause=cause,
        output=torch.where(is_same, wrong.actual, wrong.actual + 1 + wrong.actual.abs()),
        is_cause=float(is_same.double().mean()) >= _NEARLY_ALL,
    )


def are_chosen_alike(one: torch.Tensor, another: torch.Tensor) -> torch.Tensor:
    """Return [R] bool: rows of which the indices [R, C] are the same, in any order."""
    return (one.sort(dim=1).values == another.sort(dim=1).values).all(dim=1)


def other_tokens(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The positions are too few, or those of a rule that looks at no score.

    Causes: of a choice among the tokens so far: *n* tokens in the place of *n* are chosen; the latest tokens are
    chosen, whatever their scores.
    """
    if not wrong.operation.among_tokens:
        return
    right, width = wrong.expected.long(), wrong.expected.shape[1]
    most = int((wrong.actual >= 0).sum(dim=1).max())
    if most < width:
        fewer = right.masked_fill(torch.arange(width) >= most, -1)
        yield choice(wrong, f"{most} tokens in the place of {width} are chosen", fewer)
    latest = (wrong.positions[:, None] - torch.arange(width)).clamp(min=-1)
    yield choice(wrong, "the latest tokens are chosen, whatever their scores", latest)
