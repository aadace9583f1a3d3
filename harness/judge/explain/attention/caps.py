"""Ways to get the soft cap of the scores and the attention sinks wrong: left out, added, or with other values.

`R` rows, `N` query heads, `H` head size.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import fitted_factor, joined, rows_of
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_CAPS = (15.0, 20.0, 30.0, 50.0, 100.0)
"""Soft caps of scores in published models."""
_PROBED_ROWS = 4
_SAME_SHIFT = 0.02
"""Spread of the shifts of the heads' sinks up to which they are one shift."""


def left_out(failure: Failure) -> Iterator[Hypothesis]:
    """The soft cap of the scores is left out, or the sinks are."""
    if failure.views[0].softcap is not None:
        output = joined(failure, lambda view: replace(view, softcap=None).attend())
        yield Hypothesis(cause="the soft cap of the scores is left out", output=output)
    if failure.views[0].sinks is not None:
        output = joined(failure, lambda view: replace(view, sinks=None).attend())
        yield Hypothesis(cause="the attention sinks are left out", output=output)


def other_cap(failure: Failure) -> Iterator[Hypothesis]:
    """The scores have a soft cap that the model does not, or another one than it has."""
    own = failure.views[0].softcap
    fitted = _fitted_cap(failure)
    for cap, freedom in (*((item, 0) for item in _CAPS), (float(f"{fitted:.4g}"), 1)):
        if cap == own or (freedom and cap in _CAPS):
            continue
        cause = f"a soft cap of {cap:g} is applied to the scores, which the model does not have"
        yield Hypothesis(
            cause=cause if own is None else f"the soft cap of the scores is {cap:g} instead of {own:g}",
            output=joined(failure, lambda view, cap=cap: replace(view, softcap=cap).attend()),  # type: ignore[misc]
            freedom=freedom,
        )


def _fitted_cap(failure: Failure) -> float:
    """Return the cap under which some of the rows come out nearest: those that see most, where caps tell most."""
    view = max(failure.views, key=lambda each: int(each.rows.position.max()))
    order = view.rows.position.argsort(descending=True)[:_PROBED_ROWS]
    probe, rows = view.select(order), rows_of(failure, view)[order]
    return fitted_factor(view.softcap or 8.0, lambda cap: failure.misfit(rows, replace(probe, softcap=cap).attend()))


def other_sinks(failure: Failure) -> Iterator[Hypothesis]:
    """The sinks are others than the model's, or there are some that it does not have: one logit for each head.

    With Z the sum of a row's exponentials and d what the sink adds to it, a row is Z / (Z + d) of what it should be.
    """
    totals = _totals(failure)  # [R, N]
    heads, own = totals.shape[1], failure.views[0].sinks
    expected = failure.expected.unflatten(1, (heads, -1))
    if own is None and any(_begins_at_once(view) for view in failure.views):
        yield Hypothesis(
            cause="one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0",
            output=_with_sinks(expected, totals, torch.ones(heads, dtype=torch.float64)),
        )
    added = _added_to_sums(failure, totals)
    meant = torch.zeros(heads, dtype=torch.float64) if own is None else own.exp()
    if added is None or bool((meant + added <= 0).any()):
        return
    used = meant + added
    if own is None:
        yield Hypothesis(
            cause="attention sinks take part in the softmax, which the model does not have",
            output=_with_sinks(expected, totals, added),
            detail=f"their logits, head by head: {_shown(used.log())}",
            freedom=heads,
        )
        return
    shift = used.log() - own
    if float(shift.max() - shift.min()) < _SAME_SHIFT:
        common = float(shift.median())
        yield Hypothesis(
            cause=f"the logits of the attention sinks are off by {common:+.3g}",
            output=_with_sinks(expected, totals, meant * (torch.tensor(common).exp() - 1)),
            freedom=1,
        )
    yield Hypothesis(
        cause="the attention sinks are others than the model's",
        output=_with_sinks(expected, totals, added),
        detail=f"their logits are off, head by head, by {_shown(shift)}",
        freedom=heads,
    )


def _added_to_sums(failure: Failure, totals: torch.Tensor) -> torch.Tensor | None:
    """Return what gives the actual rows if it is added to each head's sums, [N]; None if nothing does."""
    actual, expected = (x.unflatten(1, (totals.shape[1], -1)) for x in (failure.actual, failure.expected))
    share = (actual * expected).sum(-1) / expected.square().sum(-1)
    if not bool((share > 0).all()):
        return None
    added = (totals * (1 / share - 1)).median(dim=0).values
    return None if bool((totals + added <= 0).any()) else added


def _begins_at_once(view: AttentionContext) -> bool:
    """Whether the first row that a request computed is wrong: a sum that is always off by one is off most there."""
    first = int((view.key_step >= 0).int().argmax())
    return int(view.rows.position.min()) == first


def _totals(failure: Failure) -> torch.Tensor:
    """Return the sums of each row's exponentials, its sink among them: [R, N]."""
    return torch.cat([_total(view) for view in failure.views])


def _total(view: AttentionContext) -> torch.Tensor:
    scores = view.scores().masked_fill(~view.visible(), -torch.inf)
    total = scores.exp().sum(dim=-1).T
    return total if view.sinks is None else total + view.sinks.exp()


def _with_sinks(expected_RNH: torch.Tensor, totals_RN: torch.Tensor, added_N: torch.Tensor) -> torch.Tensor:
    return (expected_RNH * (totals_RN / (totals_RN + added_N))[..., None]).flatten(1)


def _shown(values: torch.Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values[:8].tolist())


EXPLANATIONS = (left_out, other_cap, other_sinks)
