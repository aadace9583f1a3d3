"""A function of each element is wrong: values cut off at a limit, a soft cap. HF's own code says other activations."""

import math
from collections.abc import Iterator

import torch

from harness.judge.explain.core.fit import fit_factor
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_CAPS = (15.0, 20.0, 30.0, 50.0)
"""Soft caps in published models."""
_MIN_CUT = 3
"""Elements that a limit must have cut off: the largest of all is always one."""
_SAME_CAP = 1e-3
"""Relative distance up to which a fitted cap is the model's own."""
_FARTHEST = 50.0
"""Times the largest element beyond which a soft cap bends nothing that could be measured."""


def clamped(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Values beyond *value* are cut off."""
    actual, expected = wrong.actual, wrong.expected
    high, low = float(actual.max()), float(actual.min())
    is_high, is_low = (int(hit.sum()) >= _MIN_CUT for hit in (actual == high, actual == low))
    if low == high or not (is_high or is_low):
        return
    output = expected.clamp(low if is_low else None, high if is_high else None)
    if not torch.equal(output, expected):
        shown = [f"{limit:.6g}" for limit, is_limit in ((low, is_low), (high, is_high)) if is_limit]
        where = f"outside of {shown[0]} to {shown[1]}" if len(shown) > 1 else f"beyond {shown[0]}"
        yield Hypothesis(cause=f"values {where} are cut off", output=output, num_fitted=len(shown))


def gate_for_up(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Gate and up are swapped: the activation is applied to up."""
    if len(wrong.inputs) == 2 and (output := wrong.replay(wrong.inputs[::-1], wrong.positions)) is not None:
        yield Hypothesis(cause="gate and up are swapped: the activation is applied to up", output=output)


def soft_capped(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Every element x is cap * tanh(x / cap), which the model does not ask for; or one that it asks for is left out.

    Causes: a soft cap of *value* is applied, which the model does not have; the soft cap of *value* is left out; it is
    another.
    """
    for cap in _CAPS:
        yield _capped(wrong, cap, num_fitted=0)
    for cap in _own_caps(wrong):
        bent = wrong.expected / cap
        if bool((bent.abs() < 1).all()):
            uncapped = cap * torch.atanh(bent)
            yield Hypothesis(cause=f"the soft cap of {cap:g} is left out", output=uncapped)
            fitted_cap = _fitted_cap(wrong.actual, uncapped)
            if fitted_cap is not None and not math.isclose(fitted_cap, cap, rel_tol=_SAME_CAP):
                fitted_cap = float(f"{fitted_cap:.4g}")
                output = fitted_cap * torch.tanh(uncapped / fitted_cap)
                yield Hypothesis(
                    cause=f"the soft cap is {fitted_cap:g} instead of {cap:g}", output=output, num_fitted=1
                )
    fitted = _fitted_cap(wrong.actual, wrong.expected)
    if fitted is not None:
        yield _capped(wrong, float(f"{fitted:.4g}"), num_fitted=1)


def _own_caps(wrong: WrongOperation) -> set[float]:
    """Return the soft caps that config.json names: `final_logit_softcapping` and what other families call it."""
    values = {value for name, value in vars(wrong.config).items() if "cap" in name}
    return {float(value) for value in values if isinstance(value, float | int) and value > 0}


def _capped(wrong: WrongOperation, cap: float, num_fitted: int) -> Hypothesis:
    return Hypothesis(
        cause=f"a soft cap of {cap:g} is applied, which the model does not have",
        output=cap * torch.tanh(wrong.expected / cap),
        num_fitted=num_fitted,
    )


def _fitted_cap(y: torch.Tensor, x: torch.Tensor) -> float | None:
    """Return the cap that takes x nearest to y, [R, W] each; None if none would be seen.

    The steps begin where the series has it, with c as one over the cap: tanh(c x) / c = x - c**2 x**3 / 3.
    """
    curvature = float(((x - y) * x**3).sum() / (x**6).sum().clamp(min=torch.finfo(torch.float64).tiny))
    if curvature <= 0:
        return None
    cap = fit_factor(y, lambda cap: cap * torch.tanh(x / cap), (3 * curvature) ** -0.5)
    return cap if cap is not None and cap < _FARTHEST * float(x.abs().max()) else None
