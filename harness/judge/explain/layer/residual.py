"""Ways to get a residual addition wrong: one side missing, or another tensor in its place."""

from collections.abc import Iterator

import torch

from harness.formats.taps import Kind, Operation
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.formats import HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.hypothesis import Hypothesis, hypotheses
from harness.judge.explain.core.operations import replay


def other_addition(failure: Failure) -> Iterator[Hypothesis]:
    """Only one of the two is there, or one is added twice, subtracted, or with a factor of its own, which is fitted."""
    stream, branch = _sides(failure)
    first, second = _names(failure)
    yield from hypotheses(
        {
            f"{first} is not added": branch,
            f"{second} is not added to {first}": stream,
            f"{second} is added twice": stream + 2 * branch,
            f"{first} is added twice": 2 * stream + branch,
            f"{second} is subtracted": stream - branch,
        }
    )
    of_branch, of_stream = failure.factor_of(branch, stream), failure.factor_of(stream, branch)
    for name, factor, output in (
        (second, of_branch, stream + of_branch * branch),
        (first, of_stream, of_stream * stream + branch),
    ):
        yield Hypothesis(cause=f"{name} is added with a factor of {factor:.4g}", output=output, freedom=1)
    sides = torch.stack((stream.flatten(), branch.flatten()), dim=1)
    own, other = torch.linalg.lstsq(sides, failure.actual.reshape(-1, 1)).solution[:, 0].tolist()
    cause = f"{first} is added with a factor of {own:.4g}, and {second} with one of {other:.4g}"
    yield Hypothesis(cause=cause, output=own * stream + other * branch, freedom=2)


def _order(failure: Failure) -> tuple[str, str]:
    """Return the taps of both sides, the stream first: it was there before the branch was computed from it."""
    taps = [operation.tap for operation in failure.graph]
    first, second = sorted(failure.operation.inputs, key=taps.index)
    return first, second


def _sides(failure: Failure) -> tuple[torch.Tensor, torch.Tensor]:
    """Return stream and branch, [R, W] each."""
    sides = dict(zip(failure.operation.inputs, failure.inputs, strict=True))
    stream, branch = (sides[tap] for tap in _order(failure))
    return stream, branch


def _names(failure: Failure) -> tuple[str, str]:
    """Return what the two sides are called: a layer adds a branch to its residual stream, and experts to each other."""
    sites = [failure.graph[tap].site for tap in _order(failure)]
    if any("expert" in site for site in sites) and failure.operation.site in {
        site.rpartition(".")[0] for site in sites
    }:
        return "the output of " + sites[0], "the output of " + sites[1]
    return "the residual", "the branch"


def residual_after_the_norm(failure: Failure) -> Iterator[Hypothesis]:
    """The residual is the norm's output: taken after it, or overwritten by a norm that works in place."""
    stream, branch = _sides(failure)
    cause = "the residual is taken after the norm, or the norm overwrites it in place"
    for operation in _norms_of(failure, _order(failure)[0]):
        normed, recorded = replay(failure.hf, operation, [stream]), failure.tap(operation.tap)
        if normed is None:
            continue
        yield Hypothesis(cause=cause, output=branch + (normed if recorded is None else recorded))
        weight = failure.weight(operation.tap)
        if weight is not None:
            yield Hypothesis(cause=f"{cause}, before its weight", output=normed / weight + branch)


def _norms_of(failure: Failure, tap: str) -> list[Operation]:
    """Return the norms of this layer that read a tap."""
    layer = failure.graph.of_layer(failure.operation.layer)
    return [operation for operation in layer if operation.kind is Kind.NORM and operation.inputs == (tap,)]


def another_tensor(failure: Failure) -> Iterator[Hypothesis]:
    """One of the two is another tensor of the layer, or of the one before."""
    first = (failure.operation.layer or 0) - 1
    sites = [failure.graph[tap].site for tap in failure.operation.inputs]
    layers = [op for op in failure.graph if op.layer is None or first <= op.layer <= (failure.operation.layer or 0)]
    for operation in layers:
        other = failure.tap(operation.tap)
        if other is None or other.shape != failure.actual.shape or operation.tap in failure.operation.inputs:
            continue
        for kept, replaced in ((0, 1), (1, 0)):
            name = operation.site if operation.layer == failure.operation.layer else operation.tap
            cause = f"{name} is added in the place of {sites[replaced]}"
            yield Hypothesis(cause=cause, output=failure.inputs[kept] + other, is_vague=True)


def coarse_addition(failure: Failure) -> Iterator[Hypothesis]:
    """One of the two was rounded to a 16-bit dtype before the addition."""
    stream, branch = _sides(failure)
    for dtype in HALF_DTYPES:
        name, low = name_of(dtype), [rounded(x, dtype) for x in (stream, branch)]
        yield Hypothesis(cause=f"the residual is in {name}", output=low[0] + branch)
        yield Hypothesis(cause=f"the branch is in {name}", output=stream + low[1])
        yield Hypothesis(cause=f"the addition is of values in {name}", output=low[0] + low[1])


EXPLANATIONS = (
    other_addition,
    residual_after_the_norm,
    another_tensor,
    coarse_addition,
)
