"""Why a row may be NaN or infinite though its inputs are finite: an overflow, or memory that nobody wrote."""

from collections.abc import Iterator

import torch

from harness.explain.attention_table import cache_played_back
from harness.explain.cache import nobodys_row, played_back
from harness.explain.hypothesis import Hypothesis
from harness.explain.playback import history
from harness.explain.scene import Scene
from harness.results import Explanation
from harness.taps import Kind, prefix_of


def not_finite(scene: Scene, roundings: torch.Tensor, scope: str) -> Explanation:
    """Return what can overflow in the operation, or what it may have read.

    Args:
        scene: the wrong rows.
        roundings: [R] their errors.
        scope: which rows are wrong, in words.
    """
    source = next(_sources(scene), None)
    cause, detail = _overflow(scene) or ((source.cause, source.detail) if source else _nothing(scene))
    return Explanation(
        cause=cause,
        scope=scope,
        residual_before=float(roundings.median()),
        residual_after=None,
        num_rows=len(roundings),
        num_explained=0,
        detail=detail,
        provenance=source.provenance() if source and source.provenance else None,
    )


def _overflow(scene: Scene) -> tuple[str, str] | None:
    largest = max((float(sums.max()) for sums in _magnitudes(scene)), default=0.0)
    for dtype in (scene.dtype, torch.float16):
        limit = torch.finfo(dtype).max
        if largest > limit:
            name = str(dtype).removeprefix("torch.")
            return f"overflow of {name}", f"a sum of terms reaches {largest:.3g}, the limit is {limit:.3g}"
    return None


def _nothing(scene: Scene) -> tuple[str, str]:
    if scene.operation.kind is not Kind.ATTENTION:
        largest = float(scene.expected.abs().max())
        return "not finite though nothing in it can overflow", f"its largest element should be {largest:.3g}"
    for view in scene.views:
        key = history(scene, view, f"{prefix_of(scene.operation.tap)}k_cache")
        if key is not None and not bool(key.isfinite().all()):
            return "reads slots of its own history that nobody wrote: see k_cache", ""
    return "reads past the context length: slots that nobody wrote", "keys and values of the request are finite"


def _sources(scene: Scene) -> Iterator[Hypothesis]:
    """Ways in which memory that nobody wrote may have been read."""
    if scene.operation.kind is Kind.ATTENTION:
        yield from cache_played_back(scene)
    elif scene.operation.kind is Kind.CACHE:
        yield from (each for each in played_back(scene) if not torch.equal(each.output, scene.expected))
        yield from nobodys_row(scene)


def _magnitudes(scene: Scene) -> Iterator[torch.Tensor]:
    """Magnitudes of the elements, and of all that is summed in one: no partial sum is larger."""
    yield scene.expected.abs()
    if scene.operation.kind is Kind.LINEAR:
        weight = scene.weight(scene.operation.tap)
        if weight is not None:
            yield scene.inputs[0].flatten(1).abs() @ weight.abs().T
    elif scene.operation.kind is Kind.NORM:
        yield scene.inputs[0].flatten(1).square().sum(dim=1)
