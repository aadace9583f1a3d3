"""Ways to put tensors side by side wrongly, as a layer that predicts further tokens does before its first product."""

from collections.abc import Iterator
from itertools import permutations

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_MOST_PARTS = 4


def other_order(failure: Failure) -> Iterator[Hypothesis]:
    """The parts stand in another order."""
    sites = [failure.graph[tap].site for tap in failure.operation.inputs]
    parts = [x.flatten(1) for x in failure.inputs]
    if not 1 < len(parts) <= _MOST_PARTS or not failure.is_expected(torch.cat(parts, dim=1)):
        return
    for order in permutations(range(len(parts))):
        if order != tuple(range(len(parts))):
            names = ", ".join(sites[at] for at in order)
            yield Hypothesis(
                cause=f"the parts are joined as [{names}] instead of [{', '.join(sites)}]",
                output=torch.cat([parts[at] for at in order], dim=1),
            )


EXPLANATIONS = (other_order,)
