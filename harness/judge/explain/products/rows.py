"""Ways to get single rows of a product's weight wrong, whose outputs alone are wrong: zero, negated, or scaled.

`R` rows, `O` outputs.
"""

from collections.abc import Iterator

import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_TINY = torch.finfo(torch.float64).tiny
_TOUCHED = {torch.float32: 60.0}
"""Roundings from which an output is off by more than rounding, over all rows: more where sums are rounded, too."""
_TOUCHED_IN_16_BITS = 3.0
_NAMED = 0.02
"""Distance up to which a fitted factor is 0 or -1."""
_NAMES = {
    0.0: "some outputs are zero{what}: these rows of the weight were not loaded",
    -1.0: "some outputs have the other sign{what}: these rows of the weight are negated",
}


def rows_of_the_weight(failure: Failure) -> Iterator[Hypothesis]:
    """Some outputs are zero, have the other sign, or are scaled, each by a factor of its own; the others are right."""
    actual, expected = failure.actual, failure.expected
    bias = failure.weight(failure.operation.tap, "bias")
    product = expected if bias is None else expected - bias
    share = (actual - expected).norm(dim=0) / expected.norm(dim=0).clamp(min=_TINY)
    least = _TOUCHED.get(failure.dtype, _TOUCHED_IN_16_BITS) * rounding_unit(failure.dtype)
    outputs = (share > least).nonzero()[:, 0]
    if not len(outputs):
        return
    for offset, what in ((None, ""),) if bias is None else ((None, ""), (bias, ", but for the bias")):
        meant = expected if offset is None else product
        rest = torch.zeros_like(actual) if offset is None else offset.expand_as(actual)
        factors = ((actual - rest) * meant).sum(dim=0) / meant.square().sum(dim=0).clamp(min=_TINY)
        is_named = False
        for value, cause in _NAMES.items():
            chosen = outputs[(factors[outputs] - value).abs() < _NAMED]
            is_named |= len(chosen) == len(outputs)
            if len(chosen):
                output = _scaled(expected, value * meant + rest, chosen)
                yield Hypothesis(
                    cause=cause.format(what=what),
                    output=output,
                    detail=_listed(chosen, len(factors)),
                    freedom=len(chosen),
                )
        if not is_named:
            is_all = len(outputs) == len(factors)
            yield Hypothesis(
                cause=f"each output is scaled by a factor of its own{what}: the scales of the weight's rows are others",
                output=_scaled(expected, factors * meant + rest, outputs),
                detail=_shown(outputs, factors),
                freedom=len(outputs) if is_all else 2 * len(outputs),  # which they are, and by how much
            )


def _scaled(expected: torch.Tensor, other: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return what should be [R, O] with some outputs of another."""
    output = expected.clone()
    output[:, outputs] = other[:, outputs]
    return output


def _listed(outputs: torch.Tensor, count: int) -> str:
    first = ", ".join(map(str, outputs[:8].tolist()))
    return f"outputs {first}{' and others' if len(outputs) > 8 else ''}: {len(outputs)} of {count}"


def _shown(outputs: torch.Tensor, factors: torch.Tensor) -> str:
    first = ", ".join(f"{float(factors[at]):.4g} for output {at}" for at in outputs[:4].tolist())
    return f"{first}; {len(outputs)} of {len(factors)} are scaled"


EXPLANATIONS = (rows_of_the_weight,)
