"""Ways to get an adapter wrong, where the product is W x + s B (A x): left out, scaled otherwise, the wrong way round.

`R` rows, `O` outputs.
"""

import math
from collections.abc import Iterator

import torch

from harness.explain.hypothesis import Hypothesis
from harness.explain.scene import Scene

_SAME_SCALE = 1e-2
"""Distance up to which a fitted scale is one that has a name."""


def adapter_left_out(scene: Scene) -> Iterator[Hypothesis]:
    """The base model's product alone, or the adapter's twice."""
    update = _update(scene)
    if update is not None:
        yield Hypothesis(cause="the adapter is not applied", output=scene.expected - update)
        yield Hypothesis(cause="the adapter is applied twice", output=scene.expected + update)


def adapter_scaled(scene: Scene) -> Iterator[Hypothesis]:
    """The adapter's product is scaled by something else than alpha / r."""
    update = _update(scene)
    if update is None or not bool(update.any()):
        return
    base, rank = scene.expected - update, len(scene.module.lora_a)
    for factor, what in ((rank, "alpha, not divided by the rank"), (math.sqrt(rank), "alpha / sqrt(rank)")):
        yield Hypothesis(cause=f"the adapter's scale is {what}", output=base + factor * update)
    factor = float(((scene.actual - base) * update).sum() / update.square().sum())
    if min(abs(factor - named) for named in (0, 2, rank, math.sqrt(rank))) > _SAME_SCALE:
        cause = f"the adapter's scale is {factor:.4g} times what it should be"
        yield Hypothesis(cause=cause, output=base + factor * update, freedom=1)


def adapter_transposed(scene: Scene) -> Iterator[Hypothesis]:
    """A and B are swapped, which only a square layer lets through: the update is the transposed one."""
    update, tap = _update(scene), scene.operation.tap
    a, b = scene.weight(tap, "lora_a"), scene.weight(tap, "lora_b")
    if update is None or a is None or b is None or a.shape[1] != b.shape[0]:
        return
    swapped = scene.inputs[0].flatten(1) @ b @ a * scene.module.scaling
    cause = "A and B of the adapter are swapped, or their product is transposed"
    yield Hypothesis(cause=cause, output=scene.expected - update + swapped)


def _update(scene: Scene) -> torch.Tensor | None:
    """Return what the adapter adds, [R, O]; None where there is none."""
    if not hasattr(scene.module, "lora_a"):
        return None
    tap = scene.operation.tap
    a, b = scene.weight(tap, "lora_a"), scene.weight(tap, "lora_b")
    if a is None or b is None:
        return None
    return scene.inputs[0].flatten(1) @ a.T @ b.T * float(scene.module.scaling)


EXPLANATIONS = (adapter_left_out, adapter_scaled, adapter_transposed)
