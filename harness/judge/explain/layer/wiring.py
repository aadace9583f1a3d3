"""Operations of a layer are connected wrongly: sides of a sum with factors, parts in another order.

`R` rows, `W` elements of a row.
"""

from collections.abc import Iterator
from itertools import permutations

import torch

from harness.base.metrics import rounding_unit
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_SAME = 1e-6
_MOST_PARTS = 4


def other_addition(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Residual and branch are added with factors, which are fitted.

    Causes: the branch is added with a factor of *value*; the residual with a factor of *value*, and the branch with one
    of *value*.
    """
    sides = dict(zip(wrong.operation.inputs, wrong.inputs, strict=True))
    stream, branch = (sides[tap] for tap in _order(wrong))
    of_branch, of_stream = wrong.factor_of(branch, stream), wrong.factor_of(stream, branch)
    for name, factor, output in (
        ("branch", of_branch, stream + of_branch * branch),
        ("residual", of_stream, of_stream * stream + branch),
    ):
        yield Hypothesis(cause=f"the {name} is added with a factor of {factor:.4g}", output=output, num_fitted=1)
    columns = torch.stack((stream.flatten(), branch.flatten()), dim=1)
    factors = torch.linalg.lstsq(columns, wrong.actual.reshape(-1, 1)).solution[:, 0].tolist()
    if min(abs(factor - 1) for factor in factors) > max(_SAME, rounding_unit(wrong.dtype)):  # else one factor says it
        first, second = (f"{factor:.4g}" for factor in factors)
        cause = f"the residual is added with a factor of {first}, and the branch with one of {second}"
        yield Hypothesis(cause=cause, output=factors[0] * stream + factors[1] * branch, num_fitted=2)


def _order(wrong: WrongOperation) -> tuple[str, str]:
    """Return the taps of both sides, the stream first: it was there before the branch was computed from it."""
    taps = [operation.tap for operation in wrong.graph]
    first, second = sorted(wrong.operation.inputs, key=taps.index)
    return first, second


def other_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The parts are joined as [*tap*, *tap*] instead of [*tap*, *tap*]."""
    sites = [wrong.graph[tap].site for tap in wrong.operation.inputs]
    parts = [x.flatten(1) for x in wrong.inputs]
    if not 1 < len(parts) <= _MOST_PARTS or not wrong.is_expected(torch.cat(parts, dim=1)):
        return
    for order in permutations(range(len(parts))):
        if order != tuple(range(len(parts))):
            names = ", ".join(sites[at] for at in order)
            yield Hypothesis(
                cause=f"the parts are joined as [{names}] instead of [{', '.join(sites)}]",
                output=torch.cat([parts[at] for at in order], dim=1),
            )
