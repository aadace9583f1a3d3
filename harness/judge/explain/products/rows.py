"""Single rows of a product's weight are wrong: zero, negated, scaled, or with other scales of quantised blocks.

`R` rows, `I` inputs, `O` outputs, `B` blocks of a row of the weight, `S` weights of a block.
"""

from collections.abc import Iterator

import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

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
_SMALL_BLOCKS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}
"""Weights that share a scale, of the formats in which they are not 32."""
_WITH_MINIMA = {"Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"}
"""Formats whose weights are scale times integer minus a minimum: under another scale w becomes a w + b."""
_CHANGED, _ALIKE = 0.01, 0.05


def rows_of_the_weight(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Some outputs are zero, have the other sign, or are scaled, each by a factor of its own; the others are right.

    Causes: some outputs are zero: these rows of the weight were not loaded; some outputs have the other sign; each
    output is scaled by a factor of its own.
    """
    actual, expected = wrong.actual, wrong.expected
    bias = wrong.weight(wrong.operation.tap, "bias")
    product = expected if bias is None else expected - bias
    share = (actual - expected).norm(dim=0) / expected.norm(dim=0).clamp(min=_TINY)
    least = _TOUCHED.get(wrong.dtype, _TOUCHED_IN_16_BITS) * rounding_unit(wrong.dtype)
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
                    num_fitted=len(chosen),
                )
        if not is_named:
            is_all = len(outputs) == len(factors)
            yield Hypothesis(
                cause=f"each output is scaled by a factor of its own{what}: the scales of the weight's rows are others",
                output=_scaled(expected, factors * meant + rest, outputs),
                detail=_shown(outputs, factors),
                num_fitted=len(outputs) if is_all else 2 * len(outputs),  # which they are, and by how much
            )


def _scaled(expected: torch.Tensor, scaled: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return what should be [R, O] with some outputs of another."""
    output = expected.clone()
    output[:, outputs] = scaled[:, outputs]
    return output


def _listed(outputs: torch.Tensor, count: int) -> str:
    first = ", ".join(map(str, outputs[:8].tolist()))
    return f"outputs {first}{' and others' if len(outputs) > 8 else ''}: {len(outputs)} of {count}"


def _shown(outputs: torch.Tensor, factors: torch.Tensor) -> str:
    first = ", ".join(f"{float(factors[at]):.4g} for output {at}" for at in outputs[:4].tolist())
    return f"{first}; {len(outputs)} of {len(factors)} are scaled"


def scales_of_blocks(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """One row of the weight has other scales: a factor for each block of it, fitted; where there are minima, two.

    Causes: one row of a quantised weight has other scales: a factor for each block of the declared format (and a
    minimum, where it has one), and whether they are the neighbour's.
    """
    weight, x = wrong.weight(wrong.operation.tap), wrong.inputs[0].flatten(1)
    declared = wrong.recording.manifest.numerics
    if weight is None or declared is None:
        return
    formats = dict.fromkeys((_SMALL_BLOCKS.get(name, 32), name in _WITH_MINIMA) for name in declared.weights)
    for size, has_minima in formats:
        if weight.shape[1] % size == 0:
            yield from _fitted(wrong, x.unflatten(1, (-1, size)), weight.unflatten(1, (-1, size)), has_minima)


def _fitted(
    wrong: WrongOperation, x_RBS: torch.Tensor, weight_OBS: torch.Tensor, has_minima: bool
) -> Iterator[Hypothesis]:
    error = wrong.actual - wrong.expected
    row = int(error.norm(dim=0).argmax())
    parts = (x_RBS * weight_OBS[row]).sum(dim=2)
    columns = torch.cat((parts, x_RBS.sum(dim=2)), dim=1) if has_minima else parts
    columns = columns[:, columns.any(dim=0)]
    if len(columns) <= columns.shape[1]:
        return
    change = torch.linalg.lstsq(columns, error[:, row : row + 1]).solution[:, 0]
    output = wrong.expected.clone()
    output[:, row] += columns @ change
    factors = torch.ones(parts.shape[1], dtype=torch.float64)
    is_used = parts.any(dim=0)
    factors[is_used] += change[: int(is_used.sum())]
    yield Hypothesis(
        cause=f"the scales of blocks in row {row} of the quantised weight are others",
        output=output,
        detail=_in_words(factors, weight_OBS[row]),
        num_fitted=1 + len(change),
    )


def _in_words(factors_B: torch.Tensor, weight_BS: torch.Tensor) -> str:
    """Say by what the blocks are scaled, and whether they have their neighbours' scales."""
    largest = weight_BS.abs().amax(dim=1)
    is_changed = (factors_B - 1).abs() > _CHANGED
    inner = len(factors_B) - 1  # beyond the row's end its neighbour's scales are not known
    for shift, with_neighbour, neighbour in ((-1, slice(0, inner), "next"), (1, slice(1, None), "one before it")):
        wanted = largest.roll(shift) / largest
        near = (factors_B.abs() - wanted).abs() <= _ALIKE * wanted.clamp(min=_CHANGED)
        if bool(is_changed[with_neighbour].any()) and bool(near[with_neighbour][is_changed[with_neighbour]].all()):
            return f"{int(is_changed.sum())} of {len(factors_B)} blocks have the scale of the {neighbour}"
    return "factors " + ", ".join(f"{factor:.3g}" for factor in factors_B[:6].tolist())
