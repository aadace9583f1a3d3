"""Ways to get the steps of attention in another order: the mask, the scale, and the axis of the softmax.

`T` query rows, `S` history rows, `N` query heads, `H` head size.
"""

from collections.abc import Callable, Iterator

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import joined
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_BIASES = (-1.0, -10.0, -100.0)
"""Of masked scores, in the place of minus infinity."""
Probabilities = Callable[[AttentionContext], torch.Tensor]
"""[N, T, S] of a view."""


def mask_otherwise(failure: Failure) -> Iterator[Hypothesis]:
    """Masked scores take part in the softmax: the mask comes after it, or lowers them by too little."""
    if not any(bool((view.is_computed & ~view.visible()).any()) for view in failure.views):
        return
    if any(bool((view.visible() & ~view.is_computed).any()) for view in failure.views):
        return  # of an image that is seen whole the rest was not there: that is another mistake
    yield _hypothesis(
        failure, "the mask is applied after the softmax", lambda view: _computed(view).softmax(dim=-1) * view.visible()
    )
    yield _hypothesis(
        failure,
        "masked scores are set to 0 instead of left out",
        lambda view: _of_computed(view, view.scores() * view.visible()).softmax(dim=-1),
    )
    for bias in _BIASES:
        yield _hypothesis(
            failure,
            f"masked scores are lowered by {-bias:g} instead of left out",
            lambda view, bias=bias: (_computed(view) + bias * ~view.visible()).softmax(dim=-1),  # type: ignore[misc]
        )


def scaled_after(failure: Failure) -> Iterator[Hypothesis]:
    """The scale multiplies the probabilities."""
    output = joined(failure, lambda view: view.attend(scale=1.0) * view.scale)
    yield Hypothesis(cause="the softmax scale is applied after the softmax", output=output)


def over_the_heads(failure: Failure) -> Iterator[Hypothesis]:
    """The softmax runs over another axis."""

    def softmax(scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(dim=0)

    output = joined(failure, lambda view: view.attend(softmax=softmax))
    yield Hypothesis(cause="the softmax runs over the heads instead of the keys", output=output)

    def over_the_queries(view: AttentionContext) -> torch.Tensor:
        masked, step = view.scores().masked_fill(~view.visible(), -torch.inf), view.rows.step
        own = [masked[:, step == item].softmax(dim=1) for item in step.unique()]
        return torch.cat(own, dim=1)[:, step.argsort(stable=True).argsort()]

    yield _hypothesis(failure, "the softmax runs over the queries of a step instead of the keys", over_the_queries)


def _hypothesis(failure: Failure, cause: str, probabilities: Probabilities) -> Hypothesis:
    def attend(view: AttentionContext) -> torch.Tensor:
        return (probabilities(view).nan_to_num(0.0) @ view.spread(view.value)).transpose(0, 1).flatten(1)

    return Hypothesis(cause=cause, output=joined(failure, attend))


def _computed(view: AttentionContext) -> torch.Tensor:
    """Return the scores [N, T, S] of the keys that exist in each query's step."""
    return _of_computed(view, view.scores())


def _of_computed(view: AttentionContext, scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~view.is_computed, -torch.inf)


EXPLANATIONS = (mask_otherwise, scaled_after, over_the_heads)
