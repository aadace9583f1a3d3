"""Ways to get a residual addition wrong: one side missing, or another tensor in its place."""

from collections.abc import Iterator

import torch

from harness.explain.hypothesis import Hypothesis
from harness.explain.operations import replay
from harness.explain.scene import Scene
from harness.taps import Kind, Operation


def side_missing(scene: Scene) -> Iterator[Hypothesis]:
    """Only one of the two is there."""
    stream, branch = scene.inputs
    first, second = _names(scene)
    yield Hypothesis(cause=f"{first} is not added", output=branch)
    yield Hypothesis(cause=f"{second} is not added to {first}", output=stream)
    yield Hypothesis(cause=f"{second} is added twice", output=stream + 2 * branch)
    yield Hypothesis(cause=f"{first} is added twice", output=2 * stream + branch)
    yield Hypothesis(cause=f"{second} is subtracted", output=stream - branch)


def scaled_branch(scene: Scene) -> Iterator[Hypothesis]:
    """The branch is added with a factor, which is fitted."""
    stream, branch = scene.inputs
    factor = float(((scene.actual - stream) * branch).sum() / branch.square().sum())
    cause = f"{_names(scene)[1]} is added with a factor of {factor:.4g}"
    yield Hypothesis(cause=cause, output=stream + factor * branch, freedom=1)


def _names(scene: Scene) -> tuple[str, str]:
    """Return what the two sides are called: a layer adds a branch to its residual stream, and experts to each other."""
    sites = [scene.graph[tap].site for tap in scene.operation.inputs]
    if any("expert" in site for site in sites) and scene.operation.site in {site.rpartition(".")[0] for site in sites}:
        return "the output of " + sites[0], "the output of " + sites[1]
    return "the residual", "the branch"


def residual_behind_the_norm(scene: Scene) -> Iterator[Hypothesis]:
    """The residual is the norm's output: taken after it, or overwritten by a norm that works in place."""
    stream, branch = scene.inputs
    cause = "the residual is taken after the norm, or the norm overwrites it in place"
    for operation in _norms_of(scene, scene.operation.inputs[0]):
        normed, recorded = replay(scene.hf, operation, [stream]), scene.tap(operation.tap)
        if normed is None:
            continue
        yield Hypothesis(cause=cause, output=branch + (normed if recorded is None else recorded))
        weight = scene.weight(operation.tap)
        if weight is not None:
            yield Hypothesis(cause=f"{cause}, before its weight", output=normed / weight + branch)


def _norms_of(scene: Scene, tap: str) -> list[Operation]:
    """Return the norms of this layer that read a tap."""
    layer = scene.graph.of_layer(scene.operation.layer)
    return [operation for operation in layer if operation.kind is Kind.NORM and operation.inputs == (tap,)]


def another_tensor(scene: Scene) -> Iterator[Hypothesis]:
    """One of the two is another tensor of the layer, or of the one before."""
    first = (scene.operation.layer or 0) - 1
    layers = [op for op in scene.graph if op.layer is None or first <= op.layer <= (scene.operation.layer or 0)]
    for operation in layers:
        other = scene.tap(operation.tap)
        if other is None or other.shape != scene.actual.shape or operation.tap in scene.operation.inputs:
            continue
        for kept, replaced in ((0, 1), (1, 0)):
            name = operation.site if operation.layer == scene.operation.layer else operation.tap
            cause = f"{name} is added in the place of {_site(scene, replaced)}"
            yield Hypothesis(cause=cause, output=scene.inputs[kept] + other, is_vague=True)


def _site(scene: Scene, index: int) -> str:
    return scene.graph[scene.operation.inputs[index]].site


def coarse_addition(scene: Scene) -> Iterator[Hypothesis]:
    """One of the two was rounded to a 16-bit dtype before the addition."""
    stream, branch = scene.inputs
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        low = [x.to(dtype).to(x.dtype) for x in (stream, branch)]
        yield Hypothesis(cause=f"the residual is in {name}", output=low[0] + branch)
        yield Hypothesis(cause=f"the branch is in {name}", output=stream + low[1])
        yield Hypothesis(cause=f"the addition is of values in {name}", output=low[0] + low[1])


EXPLANATIONS = (side_missing, scaled_branch, residual_behind_the_norm, another_tensor, coarse_addition)
