"""Parts that the explanations of rotary embeddings share: the model's own rotation, and each pair's angle.

`R` rows, `N` heads, `P` pairs of a head.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.oracle.rotation import Rotation

Causes = Iterator[Hypothesis]
_MIN_ROWS = 2
_SAME = 1e-5
"""Relative standard deviation of a head's norm, before and after it is turned, of what is the same head."""


def with_rotation(causes: Callable[[Failure, Rotation], Causes]) -> Callable[[Failure], Causes]:
    """Give a function the model's own rotation; without one it yields nothing. Rows of another rotation stay."""

    @wraps(causes)
    def given(failure: Failure) -> Causes:
        read = heads_read(failure.inputs[0].flatten(1), failure.expected, failure.hf.head_dim)
        if read.shape != failure.inputs[0].shape:
            failure = replace(failure, inputs=[read, *failure.inputs[1:]])
        if failure.rotation is not None:
            yield from causes(failure, failure.rotation)
            return
        own = failure.rows_of_a_rotation()
        part = failure.take(own)
        is_most = 2 * int(own.sum()) > len(own)
        for hypothesis in causes(part, part.rotation) if part.rotation is not None and is_most else ():
            output = failure.expected.clone()
            output[own] = hypothesis.output
            yield replace(hypothesis, output=output)

    return given


def turned_by(failure: Failure, own: Rotation) -> torch.Tensor:
    """Return how far each pair was turned, weighted by its size: [R, P] complex."""
    before, after = (torch.view_as_complex(own.pairs(own.heads(x))) for x in (failure.inputs[0], failure.actual))
    return (before.conj() * after).sum(dim=1)


def heads_read(x: torch.Tensor, expected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the heads of a fused product [R, M*H] that a rotation to [R, N*H] reads; `x` where that is not known.

    Turning a head keeps its norm, but for a factor that all rows share.
    """
    is_fused = x.shape[1] > expected.shape[1] and not (x.shape[1] % head_dim or expected.shape[1] % head_dim)
    if not is_fused or len(x) < _MIN_ROWS:
        return x
    heads = x.unflatten(1, (-1, head_dim))
    ratios = expected.unflatten(1, (-1, head_dim)).norm(dim=2)[:, :, None] / heads.norm(dim=2)[:, None]  # [R, N, M]
    spread, read = (ratios.std(dim=0) / ratios.mean(dim=0)).nan_to_num(torch.inf).min(dim=1)
    return heads[:, read].flatten(1) if bool((spread < _SAME).all()) else x
