"""Ways to get an RMS norm wrong: its weight, its eps, its statistic, what it runs over.

y = w x / sqrt(mean(x^2) + eps). `R` rows, `N` heads (1 but for the norms of q and k), `D` elements that are normalised.
"""

from collections.abc import Iterator
from typing import Any

import torch

from harness.explain.hypothesis import Hypothesis
from harness.explain.scene import Scene

_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-12, 0.0, 1e-3)
_COARSE = 2.0**-6
"""Relative error of a statistic in bfloat16, at most: two roundings and a sum."""


def weight_skipped(scene: Scene) -> Iterator[Hypothesis]:
    """The rows are normalised and not scaled."""
    x, _, eps = _parts(scene)
    yield Hypothesis(cause="the norm's weight is not applied", output=_normed(x, eps))


def weight_plus_one(scene: Scene) -> Iterator[Hypothesis]:
    """The weight is taken as an offset from one, as Gemma stores it."""
    x, weight, eps = _parts(scene)
    yield Hypothesis(cause="the norm's weight is applied as 1 + weight", output=_normed(x, eps, weight + 1))


def weight_twice(scene: Scene) -> Iterator[Hypothesis]:
    """The weight is applied twice."""
    x, weight, eps = _parts(scene)
    yield Hypothesis(cause="the norm's weight is applied twice", output=_normed(x, eps, weight * weight))


def norm_skipped(scene: Scene) -> Iterator[Hypothesis]:
    """The input comes out as it went in."""
    yield Hypothesis(cause="the norm is skipped", output=scene.inputs[0].flatten(1))


def only_weight(scene: Scene) -> Iterator[Hypothesis]:
    """The input is scaled and not normalised."""
    x, weight, _ = _parts(scene)
    yield Hypothesis(cause="the norm only applies its weight", output=(x * weight).flatten(1))


def wrong_eps(scene: Scene) -> Iterator[Hypothesis]:
    """Another eps: one that models use, or the one that fits."""
    x, weight, own = _parts(scene)
    fitted = _fitted_eps(scene)
    for eps in dict.fromkeys((*_EPSILONS, *fitted)):
        freedom = 0 if eps in _EPSILONS else 1
        if eps != own:
            cause = f"wrong eps: {eps:g} instead of {own:g}"
            yield Hypothesis(cause=cause, output=_normed(x, eps, weight), freedom=freedom)
        root = x.square().mean(dim=-1, keepdim=True).sqrt() + eps
        cause = f"eps {eps:g} is added outside of the root"
        yield Hypothesis(cause=cause, output=(x / root * weight).flatten(1), freedom=1)


def _fitted_eps(scene: Scene) -> list[float]:
    """Return the eps that fits the rows together, where one does, to two digits."""
    mean, implied = _statistics(scene)
    eps = float((implied - mean).median())
    return [float(f"{eps:.2g}")] if 0 < eps < 10 else []


def mean_subtracted(scene: Scene) -> Iterator[Hypothesis]:
    """A layer norm: the mean is subtracted first."""
    x, weight, eps = _parts(scene)
    yield Hypothesis(
        cause="a layer norm: the mean is subtracted", output=_normed(x - x.mean(dim=-1, keepdim=True), eps, weight)
    )


def over_all_heads(scene: Scene) -> Iterator[Hypothesis]:
    """The heads are normalised together instead of each by itself."""
    x, weight, eps = _parts(scene)
    if x.shape[1] > 1:
        scale = (x.square().mean(dim=(1, 2), keepdim=True) + eps).rsqrt()
        yield Hypothesis(
            cause="the norm runs over all heads instead of each head", output=(x * scale * weight).flatten(1)
        )


def other_weight(scene: Scene) -> Iterator[Hypothesis]:
    """The weight is that of another norm of the checkpoint."""
    x, own, eps = _parts(scene)
    for operation in scene.graph:
        if operation.kind is scene.operation.kind and operation.tap != scene.operation.tap:
            weight = scene.weight(operation.tap)
            if weight is not None and weight.shape == own.shape and not torch.equal(weight, own):
                yield Hypothesis(cause=f"the weight is that of {operation.tap}", output=_normed(x, eps, weight))


def statistic_overflows(scene: Scene) -> Iterator[Hypothesis]:
    """The squares are infinite in the dtype that they are taken in, and the row comes out as zeros."""
    x, weight, eps = _parts(scene)
    for dtype in (torch.float32, torch.float16):
        name = str(dtype).removeprefix("torch.")
        squares = x.to(dtype).square()
        for what, mean in (
            ("squares overflow", squares.mean(dim=-1, keepdim=True).to(torch.float64)),
            ("sum of the squares overflows", squares.sum(dim=-1, keepdim=True).to(torch.float64) / x.shape[-1]),
        ):
            if not bool(mean.isfinite().all()):
                output = (x * (mean + eps).rsqrt() * weight).flatten(1)
                yield Hypothesis(cause=f"the {what} {name}", output=output)


def coarse_statistic(scene: Scene) -> Iterator[Hypothesis]:
    """The variance is computed in a 16-bit dtype."""
    x, weight, eps = _parts(scene)
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        squares = x.to(dtype).square()
        for variance in (squares.mean(dim=-1, keepdim=True), x.square().mean(dim=-1, keepdim=True).to(dtype)):
            for scale in ((variance + eps).rsqrt(), (variance.to(torch.float64) + eps).rsqrt()):
                output = (x * scale.to(torch.float64) * weight).flatten(1)
                yield Hypothesis(cause=f"the norm's variance is computed in {name}", output=output)
        low = x.to(dtype).to(torch.float64)
        normed = (low * (low.square().mean(dim=-1, keepdim=True) + eps).rsqrt()).to(dtype).to(torch.float64)
        yield Hypothesis(cause=f"the norm is computed in {name}", output=(normed * weight).flatten(1))


def own_statistic(scene: Scene) -> Iterator[Hypothesis]:
    """Each row is scaled by a factor of its own: only its statistic is wrong. How wrong tells what it was."""
    x, weight, eps = _parts(scene)
    mean, implied = _statistics(scene)
    if not bool((implied > 0).all()):
        return
    deviation = (implied / (mean + eps) - 1).abs()
    is_coarse = float(deviation.max()) < _COARSE
    yield Hypothesis(
        cause="the norm's variance is computed in a lower precision" if is_coarse else "the norm's statistic is wrong",
        output=(x * implied.rsqrt() * weight).flatten(1),
        detail=f"the statistic is off by {float(deviation.median()):.2g}, at most {float(deviation.max()):.2g}",
        freedom=1,
    )


def _parts(scene: Scene) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The input [R, N, D], the weight [D], and eps."""
    module: Any = scene.module
    weight = module.weight.detach().to("cpu", torch.float64)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    return scene.inputs[0].flatten(1).unflatten(-1, (-1, len(weight))), weight, float(eps)


def _normed(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """[R, N*D]."""
    normed = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (normed if weight is None else normed * weight).flatten(1)


def _statistics(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the squares, and what the rows were divided by, squared: [R, N, 1] each."""
    x, weight, _ = _parts(scene)
    scaled, actual = x * weight, scene.actual.view_as(x)
    gain = (actual * scaled).sum(-1, keepdim=True) / scaled.square().sum(-1, keepdim=True)
    return x.square().mean(dim=-1, keepdim=True), gain.sign() * gain.square().reciprocal()


EXPLANATIONS = (
    weight_skipped,
    norm_skipped,
    wrong_eps,
    over_all_heads,
    weight_plus_one,
    weight_twice,
    only_weight,
    mean_subtracted,
    other_weight,
    statistic_overflows,
    coarse_statistic,
    own_statistic,
)
