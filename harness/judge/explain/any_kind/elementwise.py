"""Mistakes on every element after an operation: values cut off at a limit, or bent by a soft cap."""

import math
from collections.abc import Iterator

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_CAPS = (15.0, 20.0, 30.0, 50.0)
"""Soft caps in published models."""
_MIN_CUT = 3
"""Elements that a limit must have cut off: the largest of all is always one."""
_NEWTON_STEPS = 30
_SAME_CAP = 1e-3
"""Relative distance up to which a fitted cap is the model's own."""
_FARTHEST = 50.0
"""Times the largest element beyond which a soft cap bends nothing that could be measured."""


def clamped(failure: Failure) -> Iterator[Hypothesis]:
    """Values beyond a limit are replaced by it."""
    actual, expected = failure.actual, failure.expected
    high, low = float(actual.max()), float(actual.min())
    is_high, is_low = (int(hit.sum()) >= _MIN_CUT for hit in (actual == high, actual == low))
    if low == high or not (is_high or is_low):
        return
    output = expected.clamp(low if is_low else None, high if is_high else None)
    if not torch.equal(output, expected):
        shown = [f"{limit:.6g}" for limit, is_limit in ((low, is_low), (high, is_high)) if is_limit]
        where = f"outside of {shown[0]} to {shown[1]}" if len(shown) > 1 else f"beyond {shown[0]}"
        yield Hypothesis(cause=f"values {where} are cut off", output=output, freedom=len(shown))


def soft_capped(failure: Failure) -> Iterator[Hypothesis]:
    """Every element x is cap * tanh(x / cap), which the model does not ask for; or one that it asks for is left out."""
    for cap in _CAPS:
        yield _capped(failure, cap, freedom=0)
    for cap in _own_caps(failure):
        bent = failure.expected / cap
        if bool((bent.abs() < 1).all()):
            uncapped = cap * torch.atanh(bent)
            yield Hypothesis(cause=f"the soft cap of {cap:g} is left out", output=uncapped)
            other = _fitted_cap(failure.actual, uncapped)
            if other is not None and not math.isclose(other, cap, rel_tol=_SAME_CAP):
                other = float(f"{other:.4g}")
                output = other * torch.tanh(uncapped / other)
                yield Hypothesis(cause=f"the soft cap is {other:g} instead of {cap:g}", output=output, freedom=1)
    fitted = _fitted_cap(failure.actual, failure.expected)
    if fitted is not None:
        yield _capped(failure, float(f"{fitted:.4g}"), freedom=1)


def _own_caps(failure: Failure) -> set[float]:
    """Return the soft caps that config.json names: `final_logit_softcapping` and what other families call it."""
    values = {value for name, value in vars(failure.hf.config).items() if "cap" in name}
    return {float(value) for value in values if isinstance(value, float | int) and value > 0}


def _capped(failure: Failure, cap: float, freedom: int) -> Hypothesis:
    return Hypothesis(
        cause=f"a soft cap of {cap:g} is applied, which the model does not have",
        output=cap * torch.tanh(failure.expected / cap),
        freedom=freedom,
    )


def _fitted_cap(y: torch.Tensor, x: torch.Tensor) -> float | None:
    """Return the cap that takes x nearest to y, [R, W] each; None if none would be seen.

    One over the cap, c, is fitted by Newton's steps, which begin where the series has it:
    tanh(c x) / c = x - c**2 x**3 / 3.
    """
    curvature = float(((x - y) * x**3).sum() / (x**6).sum().clamp(min=torch.finfo(torch.float64).tiny))
    if curvature <= 0:
        return None
    c = (3 * curvature) ** 0.5
    for _ in range(_NEWTON_STEPS):
        bent = torch.tanh(c * x)
        value = bent / c
        slope = (x * (1 - bent.square()) - value) / c
        energy = float(slope.square().sum())
        if not energy:
            return None
        step = float(((y - value) * slope).sum()) / energy
        c = min(max(c + step, c / 2), 2 * c)
    return 1 / c if 1 / c < _FARTHEST * float(x.abs().max()) else None


EXPLANATIONS = (clamped, soft_capped)
