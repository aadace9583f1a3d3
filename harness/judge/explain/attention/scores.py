"""Ways to get attention wrong in what a row sees, and how scores are scaled.

`T` query rows, `S` history rows, `N` query heads, `K` KV heads, `H` head size.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from harness.formats.taps import Kind
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import fitted_factor, joined, rows_of
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.formats import FLOAT8_DTYPES, HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.hypothesis import Hypothesis

_NEWTON_STEPS, _SMALL = 4, 1.0001
_PROBES = 8
"""Rows that a slope is fitted to."""
_PADDING = "padding is attended to: keys of zeros take part"
_MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
_PADDED_HEADS = (64, 128, 256)
_CLEARLY = 0.5
"""Share of another factor's error in the median row that a fitted factor leaves where it is that of some rows alone."""


def causal_mask_off(failure: Failure) -> Iterator[Hypothesis]:
    """The diagonal is on the wrong side, or there is no causal mask."""
    masks: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
        "causal mask off by one: a row does not see itself": lambda view: view.visible() & (view.distance > 0),
        "causal mask off by one: a row sees the next token": lambda view: (view.distance >= -1) & view.is_computed,
        "no causal mask: a row sees all tokens of its step": lambda view: view.is_computed,
    }
    yield from _masked(failure, masks)


def _masked(failure: Failure, masks: dict[str, Callable[[AttentionContext], torch.Tensor]]) -> Iterator[Hypothesis]:
    for cause, mask in masks.items():
        yield Hypothesis(cause=cause, output=joined(failure, lambda view, mask=mask: view.attend(visible=mask(view))))  # type: ignore[misc]


def mask_misaligned(failure: Failure) -> Iterator[Hypothesis]:
    """The mask is aligned at the top left, or a row sees its own step only, or all but it."""

    def own_step(view: AttentionContext) -> torch.Tensor:
        return view.visible() & (view.key_step == view.rows.step[:, None])

    def top_left(view: AttentionContext) -> torch.Tensor:
        index = view.rows.position - view.first_of_step
        return torch.arange(len(view.key)) <= index[:, None]

    masks: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
        "causal mask aligned top-left instead of bottom-right": top_left,
        "a row sees only the tokens of its own step: the cache is not read": own_step,
        "a row does not see the last token of the step before": lambda view: (
            view.visible() & (torch.arange(len(view.key)) != view.first_of_step[:, None] - 1)
        ),
        "a row does not see the tokens of its own step": lambda view: (
            view.visible() & (view.key_step != view.rows.step[:, None])
        ),
    }
    yield from _masked(failure, masks)


def wrong_window(failure: Failure) -> Iterator[Hypothesis]:
    """The sliding window is off by one, ignored, or one where there should be none; or an image is not seen whole."""
    if any(view.seen is not None and bool((view.seen & (view.distance < 0)).any()) for view in failure.views):
        both_ways: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
            "a part of an image does not see the parts after it": lambda view: view.visible() & (view.distance >= 0),
            "a step ends inside of an image: its parts do not see those of later steps": (
                lambda view: view.visible() & view.is_computed
            ),
        }
        yield from _masked(failure, both_ways)
        return
    window = failure.views[0].window
    if window is not None:
        sizes = {window - 1: "off by one (too narrow)", window + 1: "off by one (too wide)"}
        masks: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
            f"sliding window {name}: {size} instead of {window}": lambda view, size=size: (  # type: ignore[misc]
                (view.distance >= 0) & (view.distance < size)
            )
            for size, name in sizes.items()
        }
        masks["the sliding window of all rows of a step is that of its first row"] = lambda view: (
            (view.distance >= 0) & (torch.arange(len(view.key)) > view.first_of_step[:, None] - window)
        )
        masks["the sliding window is ignored"] = lambda view: view.distance >= 0
        yield from _masked(failure, masks)
    elif any(view.seen is not None and not torch.equal(view.seen, view.distance >= 0) for view in failure.views):
        masks = {"the mask is ignored, by which a row sees less than all before it": lambda view: view.distance >= 0}
        yield from _masked(failure, masks)
    yield from _fitted_spans(failure)


def _fitted_spans(failure: Failure) -> Iterator[Hypothesis]:
    """A row sees only its last n tokens, or only the first n, or all but the last n: n fitted to the last row."""
    view = max(failure.views, key=lambda each: int(each.rows.position.max()))
    at = int(view.rows.position.argmax())
    length = int(view.rows.position[at]) + 1
    probe, rows = view.select(torch.tensor([at])), rows_of(failure, view)[[at]]
    spans: dict[str, Callable[[AttentionContext, int], torch.Tensor]] = {
        "a row sees only the last {n} tokens": lambda each, n: (each.distance >= 0) & (each.distance < n),
        "a row sees only the first {n} tokens": lambda each, n: each.visible() & (torch.arange(len(each.key)) < n),
        "the first {n} tokens are not seen": lambda each, n: each.visible() & (torch.arange(len(each.key)) >= n),
        "a row does not see its last {n} tokens": lambda each, n: each.visible() & (each.distance >= n),
    }
    for cause, span in spans.items():
        numbers = range(1, length, max(1, length // 512))
        errors = [failure.misfit(rows, probe.attend(visible=span(probe, n))) for n in numbers]
        if errors:
            n = numbers[min(range(len(errors)), key=errors.__getitem__)]
            output = joined(failure, lambda each, n=n, span=span: each.attend(visible=span(each, n)))  # type: ignore[misc]
            yield Hypothesis(cause=cause.format(n=n), output=output, freedom=1, is_vague=view.window is not None)


def padding_attended(failure: Failure) -> Iterator[Hypothesis]:
    """Keys of zeros take part: each adds one to the sum of the exponentials. Their number is fitted to every row."""
    scores = [view.scores().masked_fill(~view.visible(), -torch.inf) for view in failure.views]
    log_total = torch.cat([score.logsumexp(dim=-1).T for score in scores])  # [R, N]
    heads = log_total.shape[1]
    actual, expected = (x.unflatten(1, (heads, -1)) for x in (failure.actual, failure.expected))
    gain = (actual * expected).sum(-1) / expected.square().sum(-1)
    if not bool((gain > 0).all()):
        return
    number = (log_total.exp() * (1 / gain - 1)).median(dim=1).values.round().clamp(min=0)
    how = _how_many_keys(failure, number.to(torch.int64))
    share = 1 / (1 + number[:, None] * (-log_total).exp())
    shown = ", ".join(str(int(n)) for n in number[:6].tolist())
    yield Hypothesis(
        cause=_PADDING if how is None else how,
        output=(expected * share[..., None]).flatten(1),
        detail=f"number of them, row by row: {shown}",
        freedom=len(number) if how is None else int(how == _PADDING),
        is_cause=how is not None,
    )


def _how_many_keys(failure: Failure, number: torch.Tensor) -> str | None:
    """Say what the numbers of keys of padding [R] follow; None if each row has another."""
    longest, own = [], []
    for request, index in zip(failure.rows.request.tolist(), failure.rows.step.tolist(), strict=True):
        step = failure.recording.steps[index]
        longest.append(int(step.position.max()) + 1)
        own.append(int(step.position[step.request == request].max()) + 1)
    context = torch.tensor(own)
    if torch.equal(number, torch.tensor(longest) - context):
        return "padding is attended to in a ragged batch"
    for multiple in _MULTIPLES:
        if torch.equal(number, -context % multiple):
            return f"padding is attended to: keys are padded with zeros to a multiple of {multiple}"
    return _PADDING if len(number) > 1 and len(number.unique()) == 1 else None


def wrong_scale(failure: Failure) -> Iterator[Hypothesis]:
    """The scores are scaled by another factor: a known one, or one that is fitted."""
    view = failure.views[0]
    own, head_dim = view.scale, view.query.shape[-1]
    hidden = int(failure.hf.config.hidden_size)
    known = {
        "missing": 1.0,
        "applied twice": own * own,
        "the head size without its root": 1 / head_dim,
        "the root itself, not its inverse": head_dim**0.5,
        "in base 2 without log2(e)": own * math.log(2),
        "with log2(e) though the base is e": own / math.log(2),
    }
    if math.isclose(known["applied twice"], 1 / head_dim):
        del known["the head size without its root"]  # the same, by another name
    if not _is_sound_elsewhere(failure):
        known |= {
            "taken from the hidden size": hidden**-0.5,
            "taken from the number of heads": view.query.shape[1] ** -0.5,
            "taken from the KV heads' total size": (view.key.shape[1] * head_dim) ** -0.5,
            **{f"that of a head size padded to {size}": size**-0.5 for size in _PADDED_HEADS if size > head_dim},
        }
    for name, scale in known.items():
        output = joined(failure, lambda each, scale=scale: each.attend(scale=scale))  # type: ignore[misc]
        yield Hypothesis(cause=f"the softmax scale is {name}: {scale:.4g} instead of {own:.4g}", output=output)
    fitted = _fitted_scale(failure)
    if f"{fitted:.4g}" != f"{own:.4g}":
        yield Hypothesis(
            cause=f"the softmax scale is {fitted:.6g} instead of {own:.6g}",
            output=joined(failure, lambda each: each.attend(scale=fitted)),
            freedom=1,
        )


def _is_sound_elsewhere(failure: Failure) -> bool:
    """Whether another layer's attention passed: the sizes of the model, which all layers have, are no reason then."""
    others = (op for op in failure.graph if op.kind is Kind.ATTENTION and op.tap != failure.operation.tap)
    return any(op.tap in failure.sound for op in others)


def _fitted_scale(failure: Failure) -> float:
    """Return the factor under which the rows come out nearest.

    A search over its logarithm in the first rows, and from there, or from the model's own factor, a few steps over all
    rows (Gauss-Newton): where each row holds mostly rounding, a few say nothing.
    """
    view = failure.views[0]
    probe = view.select(torch.arange(min(len(view.rows), 4)))
    rows = rows_of(failure, view)[: len(probe.rows)]
    found = fitted_factor(view.scale, lambda scale: failure.misfit(rows, probe.attend(scale=scale)))
    if failure.beyond is not None:
        return found
    refined = [_refined(failure, scale) for scale in (found, view.scale)]
    errors = {item: (_of_scale(failure, item) - failure.actual).norm(dim=1) for item in (found, *refined)}
    best = min(refined, key=lambda scale: float(errors[scale].norm()))
    # Where many rows have this factor exactly, the others have another cause.
    return found if errors[found].median() < _CLEARLY * errors[best].median() else best


def _refined(failure: Failure, scale: float) -> float:
    for _ in range(_NEWTON_STEPS):
        here, there = _of_scale(failure, scale), _of_scale(failure, scale * _SMALL)
        slope = (there - here) / math.log(_SMALL)
        energy = float(slope.square().sum())
        step = float(((failure.actual - here) * slope).sum()) / energy if energy else 0.0
        scale *= math.exp(max(-1.0, min(1.0, step)))
    return scale


def _of_scale(failure: Failure, scale: float) -> torch.Tensor:
    return joined(failure, lambda view: view.attend(scale=scale))


def coarse_softmax(failure: Failure) -> Iterator[Hypothesis]:
    """Scores, probabilities, or the recorded q, k and v are rounded to a 16-bit dtype."""
    for dtype in HALF_DTYPES:
        name = name_of(dtype)

        own = partial(rounded, dtype=dtype)
        softmaxes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "its result": lambda s, own=own: own(s.softmax(dim=-1)),  # type: ignore[misc]
            "its input": lambda s, own=own: own(s).softmax(dim=-1),  # type: ignore[misc]
            "input and result": lambda s, own=own: own(own(s).softmax(dim=-1)),  # type: ignore[misc]
            "all of it": lambda s, dtype=dtype: s.to(dtype).softmax(dim=-1).to(torch.float64),  # type: ignore[misc]
        }
        for part, softmax in softmaxes.items():
            output = joined(failure, lambda each, softmax=softmax: each.attend(softmax=softmax))  # type: ignore[misc]
            yield Hypothesis(cause=f"the softmax is in {name}", output=output, detail=part)
    for dtype in FLOAT8_DTYPES:
        output = joined(failure, lambda each, dtype=dtype: each.attend(softmax=lambda s: rounded(s.softmax(-1), dtype)))  # type: ignore[misc]
        yield Hypothesis(cause=f"the probabilities are rounded to {name_of(dtype)}", output=output)


def bias_added(failure: Failure) -> Iterator[Hypothesis]:
    """The scores fall with the distance, as ALiBi's do (Press et al., arXiv:2108.12409), where the model's do not."""

    def biased(view: AttentionContext, slopes: torch.Tensor) -> torch.Tensor:
        bias = slopes[:, None, None] * view.distance
        if view.sinks is not None:
            bias = torch.nn.functional.pad(bias, (0, 1))
        return view.attend(softmax=lambda scores: (scores - bias).softmax(dim=-1))

    view = failure.views[0]
    heads = view.query.shape[1]
    own = torch.exp2(-8 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    output = joined(failure, lambda each: biased(each, own))
    yield Hypothesis(cause="ALiBi is added to the scores, which the model does not have", output=output)
    probe = view.select(torch.arange(len(view.rows))[-_PROBES:])
    rows = rows_of(failure, view)[-_PROBES:]
    slope = fitted_factor(0.1, lambda each: failure.misfit(rows, biased(probe, torch.full_like(own, each))))
    output = joined(failure, lambda each: biased(each, torch.full_like(own, slope)))
    yield Hypothesis(cause=f"the scores fall by {slope:.4g} with each position", output=output, freedom=1)


EXPLANATIONS = (
    causal_mask_off,
    mask_misaligned,
    wrong_window,
    padding_attended,
    wrong_scale,
    bias_added,
    coarse_softmax,
)
