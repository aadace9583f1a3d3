"""Scores and softmax are wrong: scale, bias, soft cap, sinks, dtype, axis, or the pieces that are merged.

`R` rows, `T` query rows, `S` history rows, `N` query heads, `H` head size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from harness.formats.taps import Kind
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.core.fit import fit_by_search, fit_factor
from harness.judge.explain.core.formats import FLOAT8_DTYPES, HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_PROBES = 8
"""Rows that a slope is fitted to."""
_PADDED_HEADS = (64, 128, 256)
_CLEARLY = 0.5
"""Share of another factor's error in the median row that a fitted factor leaves where it is that of some rows alone."""
Probabilities = Callable[[AttentionContext], torch.Tensor]
"""[N, T, S] of a view."""
_STEPS, _STEP = 32, 1 / 8
"""Places on each side of the start that are tried first, and their distance on the logarithmic scale."""
_CAPS = (15.0, 20.0, 30.0, 50.0, 100.0)
"""Soft caps of scores in published models."""
_PROBED_ROWS = 4
_SAME_SHIFT = 0.02
"""Spread of the shifts of the heads' sinks up to which they are one shift."""
_MAX_SPLIT_SIZES = 24


def wrong_scale(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The scores are scaled by another factor: a known one, or one that is fitted.

    Causes: the softmax scale is missing; taken from the hidden size; in base 2 without log2(e); *value* instead of
    *value*.
    """
    view = wrong.views[0]
    right, head_dim = view.scale, view.query.shape[-1]
    hidden = int(wrong.config.hidden_size)
    known = {
        "missing": 1.0,
        "applied twice": right * right,
        "the head size without its root": 1 / head_dim,
        "the root itself, not its inverse": head_dim**0.5,
        "in base 2 without log2(e)": right * math.log(2),
        "with log2(e) though the base is e": right / math.log(2),
    }
    if math.isclose(known["applied twice"], 1 / head_dim):
        del known["the head size without its root"]  # the same, by another name
    if not _is_sound_elsewhere(wrong):
        known |= {
            "taken from the hidden size": hidden**-0.5,
            "taken from the number of heads": view.query.shape[1] ** -0.5,
            "taken from the KV heads' total size": (view.key.shape[1] * head_dim) ** -0.5,
            **{f"that of a head size padded to {size}": size**-0.5 for size in _PADDED_HEADS if size > head_dim},
        }
    for name, scale in known.items():
        if math.isclose(scale, right):
            continue
        output = wrong.over_views(lambda context, scale=scale: context.attend(scale=scale))  # type: ignore[misc]
        yield Hypothesis(cause=f"the softmax scale is {name}: {scale:.4g} instead of {right:.4g}", output=output)
    fitted = _fitted_scale(wrong)
    if f"{fitted:.4g}" != f"{right:.4g}":
        yield Hypothesis(
            cause=f"the softmax scale is {fitted:.6g} instead of {right:.6g}",
            output=wrong.over_views(lambda context: context.attend(scale=fitted)),
            num_fitted=1,
        )


def _is_sound_elsewhere(wrong: WrongOperation) -> bool:
    """Whether another layer's attention passed: the sizes of the model, which all layers have, are no reason then."""
    others = (op for op in wrong.graph if op.kind is Kind.ATTENTION and op.tap != wrong.operation.tap)
    return any(op.tap in wrong.sound for op in others)


def _fitted_scale(wrong: WrongOperation) -> float:
    """Return the factor under which the rows come out nearest.

    A search over its logarithm in the first rows, and from there, or from the model's own factor, a few steps over all
    rows (Gauss-Newton): where each row holds mostly rounding, a few say nothing.
    """
    view = wrong.views[0]
    if not wrong.can_be_fitted:
        return view.scale
    probe = view.select(torch.arange(min(len(view.rows), 4)))
    rows = wrong.rows_of(view)[: len(probe.rows)]
    searched = fitted_factor(view.scale, lambda scale: wrong.misfit(rows, probe.attend(scale=scale)))
    if wrong.downstream is not None:
        return searched
    under = partial(_of_scale, wrong)
    refined = [fit_factor(wrong.actual, under, scale) or scale for scale in (searched, view.scale)]
    errors = {item: (under(item) - wrong.actual).norm(dim=1) for item in (searched, *refined)}
    best = min(refined, key=lambda scale: float(errors[scale].norm()))
    # Where many rows have this factor exactly, the others have another cause.
    return searched if errors[searched].median() < _CLEARLY * errors[best].median() else best


def _of_scale(wrong: WrongOperation, scale: float) -> torch.Tensor:
    return wrong.over_views(lambda view: view.attend(scale=scale))


def coarse_softmax(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Scores, probabilities, or the recorded q, k and v are rounded to a 16-bit dtype.

    Causes: the softmax is in *dtype*; the probabilities are rounded to *float8*.
    """
    for dtype in HALF_DTYPES:
        name = name_of(dtype)

        coarse = partial(rounded, dtype=dtype)
        softmaxes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "its result": lambda s, coarse=coarse: coarse(s.softmax(dim=-1)),  # type: ignore[misc]
            "its input": lambda s, coarse=coarse: coarse(s).softmax(dim=-1),  # type: ignore[misc]
            "input and result": lambda s, coarse=coarse: coarse(coarse(s).softmax(dim=-1)),  # type: ignore[misc]
            "all of it": lambda s, dtype=dtype: s.to(dtype).softmax(dim=-1).to(torch.float64),  # type: ignore[misc]
        }
        for part, softmax in softmaxes.items():
            output = _under_softmax(wrong, softmax)
            yield Hypothesis(cause=f"the softmax is in {name}", output=output, detail=part)
    for dtype in FLOAT8_DTYPES:

        def softmax_in_float8(scores: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return rounded(scores.softmax(-1), dtype)

        output = _under_softmax(wrong, softmax_in_float8)
        yield Hypothesis(cause=f"the probabilities are rounded to {name_of(dtype)}", output=output)


def _under_softmax(wrong: WrongOperation, softmax: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return wrong.over_views(lambda context: context.attend(softmax=softmax))


def bias_added(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The scores fall with the distance, as ALiBi's do (Press et al., arXiv:2108.12409), where the model's do not.

    Causes: ALiBi is added to the scores, which the model does not have; the scores fall by *value* with each position.
    """

    def biased(view: AttentionContext, slopes: torch.Tensor) -> torch.Tensor:
        bias = slopes[:, None, None] * view.distance
        if view.sinks is not None:
            bias = torch.nn.functional.pad(bias, (0, 1))
        return view.attend(softmax=lambda scores: (scores - bias).softmax(dim=-1))

    view = wrong.views[0]
    heads = view.query.shape[1]
    alibi = torch.exp2(-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    output = wrong.over_views(lambda context: biased(context, alibi))
    yield Hypothesis(cause="ALiBi is added to the scores, which the model does not have", output=output)
    if not wrong.can_be_fitted:
        return
    probe = view.select(torch.arange(len(view.rows))[-_PROBES:])
    rows = wrong.rows_of(view)[-_PROBES:]
    slope = fitted_factor(0.1, lambda context: wrong.misfit(rows, biased(probe, torch.full_like(alibi, context))))
    output = wrong.over_views(lambda context: biased(context, torch.full_like(alibi, slope)))
    yield Hypothesis(cause=f"the scores fall by {slope:.4g} with each position", output=output, num_fitted=1)


def scaled_after(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The softmax scale is applied after the softmax."""
    output = wrong.over_views(lambda view: view.attend(scale=1.0) * view.scale)
    yield Hypothesis(cause="the softmax scale is applied after the softmax", output=output)


def over_the_heads(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The softmax runs over the heads, or over the queries of a step, instead of the keys."""

    def softmax(scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(dim=0)

    output = _under_softmax(wrong, softmax)
    yield Hypothesis(cause="the softmax runs over the heads instead of the keys", output=output)

    def over_the_queries(view: AttentionContext) -> torch.Tensor:
        masked, step = view.scores().masked_fill(~view.visible(), -torch.inf), view.rows.step
        by_step = [masked[:, step == item].softmax(dim=1) for item in step.unique()]
        return torch.cat(by_step, dim=1)[:, step.argsort(stable=True).argsort()]

    yield of_probabilities(wrong, "the softmax runs over the queries of a step instead of the keys", over_the_queries)


def of_probabilities(wrong: WrongOperation, cause: str, probabilities: Probabilities) -> Hypothesis:
    """Return the hypothesis that attention's probabilities are these."""

    def attend(view: AttentionContext) -> torch.Tensor:
        return (probabilities(view).nan_to_num(0.0) @ view.spread(view.value)).transpose(0, 1).flatten(1)

    return Hypothesis(cause=cause, output=wrong.over_views(attend))


def fitted_factor(start: float, error: Callable[[float], float]) -> float:
    """Return the positive number with the smallest error, by a search over its logarithm."""
    return fit_by_search([start * math.exp(step * _STEP) for step in range(-_STEPS, _STEPS + 1)], error)


def left_out(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The soft cap of the scores is left out; the attention sinks are left out."""
    if wrong.views[0].softcap is not None:
        output = wrong.over_views(lambda view: replace(view, softcap=None).attend())
        yield Hypothesis(cause="the soft cap of the scores is left out", output=output)
    if wrong.views[0].sinks is not None:
        output = wrong.over_views(lambda view: replace(view, sinks=None).attend())
        yield Hypothesis(cause="the attention sinks are left out", output=output)


def other_cap(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The scores have a soft cap that the model does not, or another one than it has.

    Causes: a soft cap of *value* is applied to the scores, which the model does not have; the soft cap of the scores is
    *value* instead of *value*; is applied before the scale.
    """
    right = wrong.views[0].softcap
    if right is not None:
        output = wrong.over_views(lambda view: replace(view, softcap=right * view.scale).attend())
        yield Hypothesis(cause="the soft cap of the scores is applied before the scale", output=output)
    fitted = _fitted_cap(wrong) if wrong.can_be_fitted else _CAPS[0]
    for cap, num_fitted in (*((item, 0) for item in _CAPS), (float(f"{fitted:.4g}"), 1)):
        if cap == right or (num_fitted and cap in _CAPS):
            continue
        cause = f"a soft cap of {cap:g} is applied to the scores, which the model does not have"
        yield Hypothesis(
            cause=cause if right is None else f"the soft cap of the scores is {cap:g} instead of {right:g}",
            output=wrong.over_views(lambda view, cap=cap: replace(view, softcap=cap).attend()),  # type: ignore[misc]
            num_fitted=num_fitted,
        )


def _fitted_cap(wrong: WrongOperation) -> float:
    """Return the cap under which some of the rows come out nearest: those that see most, where caps tell most."""
    view = max(wrong.views, key=lambda context: int(context.rows.position.max()))
    order = view.rows.position.argsort(descending=True)[:_PROBED_ROWS]
    probe, rows = view.select(order), wrong.rows_of(view)[order]
    return fitted_factor(view.softcap or 8.0, lambda cap: wrong.misfit(rows, replace(probe, softcap=cap).attend()))


def other_sinks(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The sinks are others than the model's, or there are some that it does not have: one logit for each head.

    With Z the sum of a row's exponentials and d what the sink adds to it, a row is Z / (Z + d) of what it should be.

    Causes: one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0; attention sinks
    take part in the softmax, which the model does not have; the logits of the attention sinks are off by *value*; the
    attention sinks are others than the model's.
    """
    totals = sums_of_exponentials(wrong)  # [R, N]
    heads, right = totals.shape[1], wrong.views[0].sinks
    if right is None and any(_begins_at_once(view) for view in wrong.views):
        yield Hypothesis(
            cause="one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0",
            output=with_added(wrong, totals, torch.ones(heads, dtype=torch.float64)),
        )
    of_rows = added_to_sums(wrong, totals)
    if of_rows is None:
        return
    added = of_rows.median(dim=0).values
    meant = torch.zeros(heads, dtype=torch.float64) if right is None else right.exp()
    if bool((totals + added <= 0).any()) or bool((meant + added <= 0).any()):
        return
    used = meant + added
    if right is None:
        yield Hypothesis(
            cause="attention sinks take part in the softmax, which the model does not have",
            output=with_added(wrong, totals, added),
            detail=f"their logits, head by head: {_shown(used.log())}",
            num_fitted=heads,
        )
        return
    shift = used.log() - right
    if float(shift.max() - shift.min()) < _SAME_SHIFT:
        common = float(shift.median())
        yield Hypothesis(
            cause=f"the logits of the attention sinks are off by {common:+.3g}",
            output=with_added(wrong, totals, meant * (torch.tensor(common).exp() - 1)),
            num_fitted=1,
        )
    yield Hypothesis(
        cause="the attention sinks are others than the model's",
        output=with_added(wrong, totals, added),
        detail=f"their logits are off, head by head, by {_shown(shift)}",
        num_fitted=heads,
    )


def added_to_sums(wrong: WrongOperation, totals: torch.Tensor) -> torch.Tensor | None:
    """Return the numbers [R, N] that give the actual rows if they are added to the sums; None if none do."""
    actual, expected = (x.unflatten(1, (totals.shape[1], -1)) for x in (wrong.actual, wrong.expected))
    share = (actual * expected).sum(-1) / expected.square().sum(-1)
    return totals * (1 / share - 1) if bool((share > 0).all()) else None


def _begins_at_once(view: AttentionContext) -> bool:
    """Whether the first row that a request computed is wrong: a sum that is always off by one is off most there."""
    first = int((view.key_step >= 0).int().argmax())
    return int(view.rows.position.min()) == first


def sums_of_exponentials(wrong: WrongOperation) -> torch.Tensor:
    """Return the sums of each row's exponentials, its sink among them: [R, N]."""
    return torch.cat([_sums(view) for view in wrong.views])


def _sums(view: AttentionContext) -> torch.Tensor:
    scores = view.scores().masked_fill(~view.visible(), -torch.inf)
    total = scores.exp().sum(dim=-1).T
    return total if view.sinks is None else total + view.sinks.exp()


def with_added(wrong: WrongOperation, totals: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return what the rows would be if these numbers, [N] or [R, 1], were added to the sums [R, N]."""
    share_RN = totals / (totals + added)
    rows: torch.Tensor = wrong.expected.unflatten(1, (totals.shape[1], -1)) * share_RN[..., None]
    return rows.flatten(1)


def _shown(values: torch.Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values[:8].tolist())


def splits_merged_wrongly(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The history is attended to in pieces whose results are put together without the right weights.

    Causes: split KV: natural log-sum-exp is merged in base 2; the pieces are not rescaled to a common maximum;
    averaged; summed; only the last counts.
    """
    if wrong.views[0].sinks is not None:
        return  # without them, the pieces are those of a model whose sinks are left out
    whole = max(len(view.key) for view in wrong.views)  # these split nothing: power says so
    sizes = [*_split_sizes(wrong), whole]
    splits = {f"pieces of {size} tokens": [_pieces(view, size) for view in wrong.views] for size in sizes}
    splits |= {f"{count} pieces": _even_pieces(wrong, count) for count in range(2, 9)}
    splits["keys of earlier steps, and those of the step itself"] = by_step = _old_and_own(wrong)
    for detail, views in splits.items():
        for cause, weigh in _MERGES.items():
            if views is by_step and weigh is _last_only:
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


def _even_pieces(wrong: WrongOperation, count: int) -> list[_Pieces]:
    """Each row's own history in a number of pieces of one size."""
    return [_pieces(query, -(-(int(query.rows.position) + 1) // count)) for query in wrong.single_rows()]


def _old_and_own(wrong: WrongOperation) -> list[_Pieces]:
    """Each row's history in what earlier steps wrote and what its own step did."""
    return [_pieces(query, max(1, int(query.first_of_step)), count=2) for query in wrong.single_rows()]


def _split_sizes(wrong: WrongOperation) -> list[int]:
    longest = max(len(view.key) for view in wrong.views)
    block = wrong.slot_history.block_size or 16
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
