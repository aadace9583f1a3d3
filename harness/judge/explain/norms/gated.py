"""Ways to get the gate of a gated norm wrong, as in Mamba 2: y = w norm(x silu(g)), or y = w norm(x) silu(g).

`R` rows, `W` elements of a row.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import silu

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis


def other_gate(failure: Failure) -> Iterator[Hypothesis]:
    """The gate is left out, is not activated, or is multiplied on the other side of the norm."""
    module: Any = failure.module
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or eps is None or len(failure.inputs) < 2:
        return
    x, product, *_ = (item.flatten(1) for item in failure.inputs)
    width = x.shape[1]
    if weight.dim() != 1 or width % len(weight) or x.shape != failure.expected.shape or product.shape[1] < width:
        return
    w = weight.detach().to("cpu", torch.float64).repeat(width // len(weight))

    def normed(rows: torch.Tensor) -> torch.Tensor:
        groups = rows.unflatten(1, (-1, getattr(module, "group_size", len(weight))))
        result: torch.Tensor = w * (groups * (groups.square().mean(dim=-1, keepdim=True) + float(eps)).rsqrt()).flatten(
            1
        )
        return result

    for gate in (product[:, :width], product[:, -width:]):
        before, after = normed(x * silu(gate)), normed(x) * silu(gate)
        is_before = failure.is_expected(before)
        if is_before or failure.is_expected(after):
            yield Hypothesis(cause="the gate of the norm is left out", output=normed(x))
            sides = ("after the norm instead of before", after) if is_before else ("before the norm, not after", before)
            yield Hypothesis(cause=f"the gate is multiplied {sides[0]}", output=sides[1])
            plain = normed(x * gate) if is_before else normed(x) * gate
            yield Hypothesis(cause="the gate of the norm is not activated", output=plain)
            return


EXPLANATIONS = (other_gate,)
