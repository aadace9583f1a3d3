"""Ways to get a router's choice wrong: by other scores, or not the best ones.

`R` rows, `E` experts, `C` chosen ones of a row.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch

from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import is_readback
from harness.judge.explain.core.failure import Failure, gathered
from harness.judge.explain.core.formats import rounded
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.experts.router import SCORES, bias_of, logits_of
from harness.results.check import Explanation

_NEARLY_ALL = 0.9
"""Share of the rows that a cause must explain: no rounding turns one choice into another, and some agree by chance."""


def explain_count(operation: Operation, recording: Recording) -> Explanation | None:
    """Explain a choice of too few or too many, which can be compared with nothing; None for any other operation."""
    entry = next((entry for entry in recording.manifest.taps if entry.name == operation.tap), None)
    if operation.kind is not Kind.CHOICE or entry is None:
        return None
    actual, expected = prod(entry.shape), prod(operation.shape)
    return Explanation(
        cause=f"wrong top-k: a row has {actual} chosen experts, and should have {expected}",
        scope="all rows",
    )


def other_choice(failure: Failure) -> Iterator[Hypothesis]:
    """The indices are those of other scores, or not of the best ones."""
    if failure.operation.among_tokens:  # no experts
        return
    scores, count = failure.inputs[0].flatten(1), failure.expected.shape[1]
    order = scores.argsort(dim=1, descending=True)
    yield choice(failure, "the experts with the lowest scores are chosen", order.flip(1)[:, :count])
    if order.shape[1] > count:
        yield choice(
            failure, "the best expert is passed over: the choice begins at the second", order[:, 1 : count + 1]
        )
    yield choice(failure, "the best expert is chosen for every place", order[:, :1].expand(-1, count))
    if _is_one_choice(failure):
        yield choice(
            failure, "every row is sent to the same experts", failure.actual[:1].long().expand(len(scores), -1)
        )
    yield choice(failure, "the numbers of the experts are one too high", order[:, :count] + 1)
    yield choice(failure, "the numbers of the experts are one too low", order[:, :count] - 1)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        coarse = rounded(scores, dtype).argsort(dim=1, descending=True, stable=True)[:, :count]
        yield choice(failure, f"the experts are chosen by scores in {name}", coarse)


def _is_one_choice(failure: Failure) -> bool:
    """Whether all rows that were recorded, the right ones too, have the same experts."""
    tap = failure.operation.tap
    steps = [step for step in failure.recording.steps if not is_readback(step) and step.has(tap)]
    recorded = torch.cat([step.tap(tap).flatten(1) for step in steps]).sort(dim=1).values
    return len(recorded.unique(dim=0)) == 1


def choice_by_other_scores(failure: Failure) -> Iterator[Hypothesis]:
    """The choice forgets what the model adds to the scores, or the groups that it is made in."""
    logits = None if failure.operation.among_tokens else logits_of(failure)
    if logits is None:
        return
    count = failure.expected.shape[1]
    bias = bias_of(failure)
    for name, score in list(SCORES.items())[:2]:
        plain = score(logits)
        if bias is not None:
            cause = "the router's bias is left out of the choice, or its groups are"
            yield choice(failure, cause, plain.topk(count).indices)
            if len(failure.operation.shape) > 1:  # the best of each group
                groups, each = failure.operation.shape[-2:]
                best = plain.unflatten(1, (groups, -1)).topk(each).indices.flatten(1)
                yield choice(failure, "the router's bias is left out of the choice", best)
            for sign, which in ((1, "without its groups"), (-1, "with the sign of its bias turned")):
                biased = plain + sign * bias
                yield choice(failure, f"the router chooses by {name} {which}", biased.topk(count).indices)


def choice_of_another_row(failure: Failure) -> Iterator[Hypothesis]:
    """The indices are those of the row before or after."""
    if failure.operation.among_tokens or not failure.operation.inputs:
        return
    tap, count = failure.operation.inputs[0], failure.expected.shape[1]
    for shift in (-1, 1):
        at = (failure.positions + shift).clamp(min=0)
        logits = gathered(failure.locator, tap, replace(failure.rows, position=at))
        if logits is not None:
            cause = f"the experts are those of another row, {shift:+d} positions away"
            yield choice(failure, cause, logits.topk(count).indices)


def choice(failure: Failure, cause: str, chosen: torch.Tensor) -> Hypothesis:
    """Return a hypothesis about indices [R, C], whose order is free."""
    is_same = (chosen.sort(dim=1).values == failure.actual.sort(dim=1).values).all(dim=1, keepdim=True)
    return Hypothesis(
        cause=cause,
        output=torch.where(is_same, failure.actual, failure.actual + 1 + failure.actual.abs()),
        is_cause=float(is_same.double().mean()) >= _NEARLY_ALL,
    )


EXPLANATIONS = (other_choice, choice_by_other_scores, choice_of_another_row)
