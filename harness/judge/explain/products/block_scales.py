"""Ways to get a quantised weight wrong that leave its integers alone: blocks of it have other scales.

`R` rows, `I` inputs, `B` blocks of a row of the weight, `S` weights of a block.
"""

from collections.abc import Iterator

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_SMALL_BLOCKS = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}
"""Weights that share a scale, of the formats in which they are not 32."""
_WITH_MINIMA = {"Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K"}
"""Formats whose weights are scale times integer minus a minimum: under another scale w becomes a w + b."""
_CHANGED, _ALIKE = 0.01, 0.05


def scales_of_blocks(failure: Failure) -> Iterator[Hypothesis]:
    """One row of the weight has other scales: a factor for each block of it, fitted; where there are minima, two."""
    weight, x = failure.weight(failure.operation.tap), failure.inputs[0].flatten(1)
    declared = failure.recording.manifest.numerics
    if weight is None or declared is None:
        return
    formats = dict.fromkeys((_SMALL_BLOCKS.get(name, 32), name in _WITH_MINIMA) for name in declared.weights)
    for size, has_minima in formats:
        if weight.shape[1] % size == 0:
            yield from _fitted(failure, x.unflatten(1, (-1, size)), weight.unflatten(1, (-1, size)), has_minima)


def _fitted(failure: Failure, x_RBS: torch.Tensor, weight_OBS: torch.Tensor, has_minima: bool) -> Iterator[Hypothesis]:
    error = failure.actual - failure.expected
    row = int(error.norm(dim=0).argmax())
    parts = (x_RBS * weight_OBS[row]).sum(dim=2)
    columns = torch.cat((parts, x_RBS.sum(dim=2)), dim=1) if has_minima else parts
    columns = columns[:, columns.any(dim=0)]
    if len(columns) <= columns.shape[1]:
        return
    change = torch.linalg.lstsq(columns, error[:, row : row + 1]).solution[:, 0]
    output = failure.expected.clone()
    output[:, row] += columns @ change
    factors = torch.ones(parts.shape[1], dtype=torch.float64)
    is_used = parts.any(dim=0)
    factors[is_used] += change[: int(is_used.sum())]
    yield Hypothesis(
        cause=f"the scales of blocks in row {row} of the quantised weight are others",
        output=output,
        detail=_in_words(factors, weight_OBS[row]),
        freedom=1 + len(change),
    )


def _in_words(factors_B: torch.Tensor, weight_BS: torch.Tensor) -> str:
    """Say by what the blocks are scaled, and whether they have their neighbours' scales."""
    largest = weight_BS.abs().amax(dim=1)
    is_changed = (factors_B - 1).abs() > _CHANGED
    inner = len(factors_B) - 1  # beyond the row's end its neighbour's scales are not known
    for shift, own, neighbour in ((-1, slice(0, inner), "next"), (1, slice(1, None), "one before it")):
        wanted = largest.roll(shift) / largest
        near = (factors_B.abs() - wanted).abs() <= _ALIKE * wanted.clamp(min=_CHANGED)
        if bool(is_changed[own].any()) and bool(near[own][is_changed[own]].all()):
            return f"{int(is_changed.sum())} of {len(factors_B)} blocks have the scale of the {neighbour}"
    return "factors " + ", ".join(f"{factor:.3g}" for factor in factors_B[:6].tolist())


EXPLANATIONS = (scales_of_blocks,)
