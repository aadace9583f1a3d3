"""Parts that the explanations of rotary embeddings share: the model's own rotation, and each pair's angle.

`R` rows, `N` heads, `P` pairs of a head.
"""

from collections.abc import Callable, Iterator
from functools import wraps

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.oracle.rotation import Rotation

Causes = Iterator[Hypothesis]


def with_rotation(causes: Callable[[Failure, Rotation], Causes]) -> Callable[[Failure], Causes]:
    """Give a function the model's own rotation; without one it yields nothing."""

    @wraps(causes)
    def given(failure: Failure) -> Causes:
        if failure.rotation is not None:
            yield from causes(failure, failure.rotation)

    return given


def turned_by(failure: Failure, own: Rotation) -> torch.Tensor:
    """Return how far each pair was turned, weighted by its size: [R, P] complex."""
    before, after = (torch.view_as_complex(own.pairs(own.heads(x))) for x in (failure.inputs[0], failure.actual))
    return (before.conj() * after).sum(dim=1)
