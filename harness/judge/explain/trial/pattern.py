"""A description of wrong rows for which no known cause fits: size, heads and elements, growth."""

import torch

from harness.formats.taps import KINDS
from harness.judge.explain.core.failure import Failure

_UNRELATED = 0.3
"""Cosine below which two rows have nothing to do with each other."""
_TREND = 0.8
"""Correlation of ranks from which an error is said to grow with the position."""


def pattern(failure: Failure) -> str:
    """Describe the difference between what is and what should be."""
    parts = [_size(failure), _blocks(failure), _growth(failure)]
    return "; ".join(part for part in parts if part)


def _size(failure: Failure) -> str:
    actual, expected = failure.actual, failure.expected
    cosine = float(torch.nn.functional.cosine_similarity(actual, expected, dim=1).median())
    ratio = float((actual.norm(dim=1) / expected.norm(dim=1)).median())
    if abs(cosine) < _UNRELATED:
        return f"unrelated to what it should be (cosine {cosine:.2g}, norm {ratio:.3g} times)"
    error = float(((actual - expected).norm(dim=1) / expected.norm(dim=1)).median())
    return f"off by {error:.2g} of the row's norm (cosine {cosine:.6g}, norm {ratio:.6g} times)"


def _blocks(failure: Failure) -> str:
    """Name the heads that carry the error, or the run of elements if that is not all of them."""
    error = (failure.actual - failure.expected).norm(dim=0)
    head_dim = failure.hf.head_dim if KINDS[failure.operation.kind].has_heads else 0
    if head_dim and len(error) > head_dim and not len(error) % head_dim:
        per_head = error.view(-1, head_dim).norm(dim=1)
        heads = (per_head > 0.01 * per_head.max()).nonzero()[:, 0].tolist()
        if len(heads) < len(per_head):
            return f"only in heads {', '.join(map(str, heads))} of {len(per_head)}"
    wrong = (error > 0.01 * error.max()).nonzero()[:, 0]
    first, last = int(wrong[0]), int(wrong[-1])
    if len(wrong) == last - first + 1 < len(error):
        return f"only in elements {first} to {last} of {len(error)}"
    return f"only in {len(wrong)} of {len(error)} elements" if len(wrong) < len(error) else ""


def _growth(failure: Failure) -> str:
    error = (failure.actual - failure.expected).norm(dim=1) / failure.expected.norm(dim=1)
    if len(error) < 8 or len(failure.positions.unique()) < 8:
        return ""
    ranks = [x.argsort().argsort().double() for x in (failure.positions, error)]
    correlation = float(torch.corrcoef(torch.stack(ranks))[0, 1])
    if abs(correlation) < _TREND:
        return ""
    return f"{'grows' if correlation > 0 else 'falls'} with the position (rank correlation {correlation:.2f})"
