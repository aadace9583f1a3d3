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
    """Give a function the model's own rotation, without which it yields nothing. What has none, or another, stays."""

    @wraps(causes)
    def given(failure: Failure) -> Causes:
        read = heads_read(failure.inputs[0].flatten(1), failure.expected, failure.hf.head_dim)
        if read.shape != failure.inputs[0].shape:
            failure = replace(failure, inputs=[read, *failure.inputs[1:]])
        if failure.rotation is not None:
            yield from causes(failure, failure.rotation)
            return
        for part, where in parts_turned(failure):
            for hypothesis in causes(part, part.rotation) if part.rotation is not None else ():
                yield replace(hypothesis, output=put(failure, where, hypothesis.output))

    return given


Where = tuple[torch.Tensor | slice, ...]
"""Rows and columns of a failure."""


def parts_turned(failure: Failure) -> Iterator[tuple[Failure, Where]]:
    """Yield the most rows that one rotation gives, and the heads that are turned, where others are copies."""
    rows = failure.rows_of_a_rotation()
    if 2 * int(rows.sum()) > len(rows):
        yield failure.take(rows), (rows,)
    size = failure.hf.head_dim
    pool = [x.flatten(1).unflatten(1, (-1, size)) for x in failure.inputs if not x.flatten(1).shape[1] % size]
    if not pool or failure.expected.shape[1] % size or len(failure.rows) < _MIN_ROWS:
        return
    heads, expected = torch.cat(pool, dim=1), failure.expected.unflatten(1, (-1, size))
    spread, read = _spread(expected, heads).min(dim=1)
    is_turned = (spread < _SAME) & (expected != heads[:, read]).any(dim=2).any(dim=0)
    where = (slice(None), is_turned.repeat_interleave(size))
    if 0 < int(is_turned.sum()) < len(is_turned):  # latent attention turns a part of each head
        inputs = [heads[:, read[is_turned]].flatten(1)]
        yield replace(failure, inputs=inputs, expected=failure.expected[where], actual=failure.actual[where]), where


def put(failure: Failure, where: Where, output: torch.Tensor) -> torch.Tensor:
    """Return [R, W] what should be, with a part of it replaced."""
    whole = failure.expected.clone()
    whole[where] = output
    return whole


def pairs_of(failure: Failure, own: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs before they are turned and as they were recorded: [R, N, P] complex each."""
    before, after = own.heads(failure.inputs[0]), own.heads(failure.actual)
    return torch.view_as_complex(own.pairs(before)), torch.view_as_complex(own.pairs(after, is_turned=True))


def turned_by(failure: Failure, own: Rotation) -> torch.Tensor:
    """Return how far each pair was turned, weighted by its size: [R, P] complex."""
    before, after = pairs_of(failure, own)
    return (before.conj() * after).sum(dim=1)


def heads_read(x: torch.Tensor, expected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the heads of a fused product [R, M*H] that a rotation to [R, N*H] reads; `x` where that is not known.

    Turning a head keeps its norm, but for a factor that all rows share.
    """
    is_fused = x.shape[1] > expected.shape[1] and not (x.shape[1] % head_dim or expected.shape[1] % head_dim)
    if not is_fused or len(x) < _MIN_ROWS:
        return x
    heads = x.unflatten(1, (-1, head_dim))
    spread, read = _spread(expected.unflatten(1, (-1, head_dim)), heads).min(dim=1)
    return heads[:, read].flatten(1) if bool((spread < _SAME).all()) else x


def _spread(expected_RNH: torch.Tensor, heads_RMH: torch.Tensor) -> torch.Tensor:
    """Return [N, M]: how unequal the ratio of two heads' norms is over the rows, relative to itself."""
    ratios = expected_RNH.norm(dim=2)[:, :, None] / heads_RMH.norm(dim=2)[:, None]
    spread: torch.Tensor = (ratios.std(dim=0) / ratios.mean(dim=0)).nan_to_num(torch.inf)
    return spread
