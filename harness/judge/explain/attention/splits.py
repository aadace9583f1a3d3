"""Attention that is computed in pieces of the history, whose results are put together wrongly.

`T` query rows, `S` history rows, `N` query heads, `H` head size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import single_rows
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_MAX_SPLIT_SIZES = 24


def splits_merged_wrongly(failure: Failure) -> Iterator[Hypothesis]:
    """The history is attended to in pieces whose results are put together without the right weights."""
    splits = {
        f"pieces of {size} tokens": [_pieces(view, size) for view in failure.views] for size in _split_sizes(failure)
    }
    splits |= {f"{count} pieces": _even_pieces(failure, count) for count in range(2, 9)}
    splits["keys of earlier steps, and those of the step itself"] = whole = _old_and_own(failure)
    for detail, views in splits.items():
        for cause, weigh in _MERGES.items():
            if views is whole and weigh is _last_only:
                continue  # the same as a mask that hides the cache
            yield Hypothesis(cause=cause, output=torch.cat([item.merged(weigh) for item in views]), detail=detail)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Attention over each piece of a history by itself."""

    outputs: torch.Tensor
    """[pieces, N, T, H]."""
    log_sums: torch.Tensor
    """[pieces, N, T]."""
    maxima: torch.Tensor
    """[pieces, N, T]."""

    def merged(self, weigh: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[T, N*H]: the pieces put together by the weights that `weigh` gives them."""
        weights = weigh(self.log_sums, self.maxima)
        return (weights[..., None] * self.outputs).sum(dim=0).transpose(0, 1).flatten(1)


def _pieces(view: AttentionContext, size: int, count: int | None = None) -> _Pieces:
    """Pieces of one size; with a count, the last of so many holds all that is left."""
    scores = view.scores().masked_fill(~view.visible(), -torch.inf)
    values = view.spread(view.value)
    starts = [*range(0, scores.shape[-1], size)][:count]
    ends = [*starts[1:], scores.shape[-1]]
    pieces = [(scores[..., at:end], values[:, at:end]) for at, end in zip(starts, ends, strict=True)]
    return _Pieces(
        torch.stack([piece.softmax(dim=-1).nan_to_num(0.0) @ value for piece, value in pieces]),
        torch.stack([piece.logsumexp(dim=-1) for piece, _ in pieces]),
        torch.stack([piece.amax(dim=-1) for piece, _ in pieces]),
    )


def _even_pieces(failure: Failure, count: int) -> list[_Pieces]:
    """Each row's own history in a number of pieces of one size."""
    return [_pieces(query, -(-(int(query.rows.position) + 1) // count)) for query in single_rows(failure)]


def _old_and_own(failure: Failure) -> list[_Pieces]:
    """Each row's history in what earlier steps wrote and what its own step did."""
    return [_pieces(query, max(1, int(query.first_of_step)), count=2) for query in single_rows(failure)]


def _split_sizes(failure: Failure) -> list[int]:
    longest = max(len(view.key) for view in failure.views)
    block = failure.slot_history.block_size or 16
    sizes = {1 << power for power in range(1, 13)} | {block * number for number in range(1, 9)}
    return sorted(size for size in sizes if size < longest)[:_MAX_SPLIT_SIZES]


def _exists(log_sum: torch.Tensor) -> torch.Tensor:
    """Return 1 where a piece holds a key that is seen, else 0."""
    return log_sum.isfinite().to(log_sum.dtype)


def _last_only(log_sum: torch.Tensor, _maximum: torch.Tensor) -> torch.Tensor:
    exists = _exists(log_sum)
    return exists * (exists.cumsum(dim=0) == exists.sum(dim=0))


_MERGES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "split KV: natural log-sum-exp is merged in base 2": lambda log_sum, _: (log_sum * math.log(2)).softmax(dim=0),
    "split KV: log-sum-exp in base 2 is merged in base e": lambda log_sum, _: (log_sum / math.log(2)).softmax(dim=0),
    "split KV: the pieces are not rescaled to a common maximum": lambda log_sum, maximum: (
        (log_sum - maximum).nan_to_num(-torch.inf).softmax(dim=0)
    ),
    "split KV: the pieces are averaged": lambda log_sum, _: _exists(log_sum) / _exists(log_sum).sum(dim=0),
    "split KV: the pieces are summed without weights": lambda log_sum, _: _exists(log_sum),
    "split KV: only the last piece counts": _last_only,
}
"""The weights of the pieces, by their log-sum-exps and maxima: [pieces, N, T] each."""

EXPLANATIONS = (splits_merged_wrongly,)
