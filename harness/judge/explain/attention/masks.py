"""The wrong keys take part in attention: causal mask, sliding window, padding, masked scores that still count.

`T` query rows, `S` history rows, `N` query heads.
"""

from collections.abc import Callable, Iterator

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.softmax import added_to_sums, of_probabilities, sums_of_exponentials, with_added
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_PADDING = "padding is attended to: keys of zeros take part"
_MULTIPLES = (4, 8, 16, 32, 64, 128, 256)
_BIASES = (-1.0, -10.0, -100.0)
"""Of masked scores, in the place of minus infinity."""


def causal_mask_off(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Causal mask off by one: a row does not see itself; a row sees the next token; no causal mask."""
    masks: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
        "causal mask off by one: a row does not see itself": lambda view: view.visible() & (view.distance > 0),
        "causal mask off by one: a row sees the next token": lambda view: (view.distance >= -1) & view.is_computed,
        "no causal mask: a row sees all tokens of its step": lambda view: view.is_computed,
    }
    yield from _masked(wrong, masks)


def _masked(
    wrong: WrongOperation, masks: dict[str, Callable[[AttentionContext], torch.Tensor]]
) -> Iterator[Hypothesis]:
    for cause, mask in masks.items():
        yield Hypothesis(cause=cause, output=wrong.over_views(lambda view, mask=mask: view.attend(visible=mask(view))))  # type: ignore[misc]


def mask_misaligned(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The mask is aligned at the top left, or a row sees its own step only, or all but it.

    Causes: causal mask aligned top-left instead of bottom-right; a row sees only the tokens of its own step: the cache
    is not read; a row does not see the last token of the step before.
    """

    def own_step(view: AttentionContext) -> torch.Tensor:
        return view.visible() & (view.key_step == view.rows.step[:, None])

    masks: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
        "causal mask aligned top-left instead of bottom-right": lambda view: _distance_of_top_left(view) >= 0,
        "a row sees only the tokens of its own step: the cache is not read": own_step,
        "a row does not see the last token of the step before": lambda view: (
            view.visible() & (torch.arange(len(view.key)) != view.first_of_step[:, None] - 1)
        ),
        "a row does not see the tokens of its own step": lambda view: (
            view.visible() & (view.key_step != view.rows.step[:, None])
        ),
    }
    yield from _masked(wrong, masks)


def _distance_of_top_left(view: AttentionContext) -> torch.Tensor:
    """[T, S] int64: distances where a mask takes the first row of a step for position 0."""
    return view.distance - view.first_of_step[:, None]


def mask_otherwise(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Masked scores take part in the softmax: the mask comes after it, or lowers them by too little.

    Causes: the mask is applied after the softmax; masked scores are set to 0, or lowered by *value*, instead of left
    out.
    """
    if not any(bool((view.is_computed & ~view.visible()).any()) for view in wrong.views):
        return
    if any(bool((view.visible() & ~view.is_computed).any()) for view in wrong.views):
        return  # of an image that is seen whole the rest was not there: that is another mistake
    if wrong.views[0].sinks is not None:
        return  # without them, these are the rows of a model whose sinks are left out
    yield of_probabilities(
        wrong, "the mask is applied after the softmax", lambda view: _computed(view).softmax(dim=-1) * view.visible()
    )
    yield of_probabilities(
        wrong,
        "masked scores are set to 0 instead of left out",
        lambda view: _of_computed(view, view.scores() * view.visible()).softmax(dim=-1),
    )
    for bias in _BIASES:
        yield of_probabilities(
            wrong,
            f"masked scores are lowered by {-bias:g} instead of left out",
            lambda view, bias=bias: (_computed(view) + bias * ~view.visible()).softmax(dim=-1),  # type: ignore[misc]
        )


def _computed(view: AttentionContext) -> torch.Tensor:
    """Return the scores [N, T, S] of the keys that exist in each query's step."""
    return _of_computed(view, view.scores())


def _of_computed(view: AttentionContext, scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~view.is_computed, -torch.inf)


def wrong_window(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The sliding window is off by one, ignored, or one where there should be none; or an image is not seen whole.

    Causes: sliding window off by one (too narrow, too wide); the sliding window is ignored; the mask is ignored, by
    which a row sees less than all before it; the sliding window of all rows of a step is that of its first row; the
    sliding window, or its band, is aligned top-left instead of bottom-right; a row sees only the last *n* tokens; a
    part of an image does not see the parts after it; a step ends inside of an image.
    """
    if any(view.seen is not None and bool((view.seen & (view.distance < 0)).any()) for view in wrong.views):
        both_ways: dict[str, Callable[[AttentionContext], torch.Tensor]] = {
            "a part of an image does not see the parts after it": lambda view: view.visible() & (view.distance >= 0),
            "a step ends inside of an image: its parts do not see those of later steps": (
                lambda view: view.visible() & view.is_computed
            ),
        }
        yield from _masked(wrong, both_ways)
        return
    window = wrong.views[0].window
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
        masks["the sliding window is aligned top-left instead of bottom-right"] = lambda view: (
            (view.distance >= 0) & (_distance_of_top_left(view) < window)
        )
        masks["the band of the sliding window is aligned top-left instead of bottom-right"] = lambda view: (
            (view.distance >= 0) & (_distance_of_top_left(view).abs() < window)
        )
        masks["the sliding window is ignored"] = lambda view: view.distance >= 0
        yield from _masked(wrong, masks)
    elif any(view.seen is not None and not torch.equal(view.seen, view.distance >= 0) for view in wrong.views):
        masks = {"the mask is ignored, by which a row sees less than all before it": lambda view: view.distance >= 0}
        yield from _masked(wrong, masks)
    yield from _fitted_spans(wrong)


def _fitted_spans(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A row sees only its last n tokens, or only the first n, or all but the last n: n fitted to the last row."""
    view = max(wrong.views, key=lambda context: int(context.rows.position.max()))
    at = int(view.rows.position.argmax())
    length = int(view.rows.position[at]) + 1
    probe, rows = view.select(torch.tensor([at])), wrong.rows_of(view)[[at]]
    numbers = torch.arange(1, length, max(1, length // 512))
    if not len(numbers):
        return
    first, not_first = context_before_and_from(probe, probe.visible()[0], numbers)
    ends = length - numbers.flip(0)
    not_last, _ = context_before_and_from(probe, probe.visible()[0], ends)
    _, last = context_before_and_from(probe, probe.distance[0] >= 0, ends)
    spans: dict[str, tuple[torch.Tensor, Callable[[AttentionContext, int], torch.Tensor]]] = {
        "a row sees only the last {n} tokens": (
            last.flip(0), lambda context, n: (context.distance >= 0) & (context.distance < n)
        ),
        "a row sees only the first {n} tokens": (
            first, lambda context, n: context.visible() & (torch.arange(len(context.key)) < n)
        ),
        "the first {n} tokens are not seen": (
            not_first, lambda context, n: context.visible() & (torch.arange(len(context.key)) >= n)
        ),
        "a row does not see its last {n} tokens": (
            not_last.flip(0), lambda context, n: context.visible() & (context.distance >= n)
        ),
    }  # fmt: skip
    for cause, (outputs, span) in spans.items():
        errors = [wrong.misfit(rows, output) for output in outputs.split(1)]
        n = int(numbers[min(range(len(errors)), key=errors.__getitem__)])
        output = wrong.over_views(lambda context, n=n, span=span: context.attend(visible=span(context, n)))  # type: ignore[misc]
        yield Hypothesis(cause=cause.format(n=n), output=output, num_fitted=1, is_vague=view.window is not None)


def context_before_and_from(
    probe: AttentionContext, visible: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context of one row over the history before each end, and over that from it on: [E, N*H] each.

    All ends together take as long as one pass over the history: what is between two ends is summed once.

    Args:
        probe: of one row.
        visible: [S] bool.
        ends: [E] int64, ascending.
    """
    scores_NS = probe.scores()[:, 0].masked_fill(~visible, -torch.inf)
    highest = scores_NS.amax(dim=1) if probe.sinks is None else torch.maximum(scores_NS.amax(dim=1), probe.sinks)
    weights_NS = (scores_NS - highest[:, None]).exp()
    v_NSH = probe.spread(probe.value)
    parts = zip(weights_NS.tensor_split(ends, dim=1), v_NSH.tensor_split(ends, dim=1), strict=True)
    sums = [torch.cat(((w[:, None] @ v)[:, 0], w.sum(dim=1, keepdim=True)), dim=1) for w, v in parts]
    sums_ENH = torch.stack(sums)
    sink = 0.0 if probe.sinks is None else (probe.sinks - highest).exp()
    before, rest = sums_ENH[:-1].cumsum(dim=0), sums_ENH[1:].flip(0).cumsum(dim=0).flip(0)
    outputs = [(total[..., :-1] / (total[..., -1] + sink)[..., None]).nan_to_num(0.0) for total in (before, rest)]
    return outputs[0].flatten(1), outputs[1].flatten(1)


def padding_attended(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Keys of zeros take part: each adds one to the sum of the exponentials. Their number is fitted to every row.

    Causes: padding is attended to: keys of zeros take part; keys are padded with zeros to a multiple of *n*; in a
    ragged batch.
    """
    totals = sums_of_exponentials(wrong)
    added = added_to_sums(wrong, totals)
    if added is None:
        return
    number = added.median(dim=1).values.round().clamp(min=0)
    how = _how_many_keys(wrong, number.to(torch.int64))
    shown = ", ".join(str(int(n)) for n in number[:6].tolist())
    yield Hypothesis(
        cause=_PADDING if how is None else how,
        output=with_added(wrong, totals, number[:, None]),
        detail=f"number of them, row by row: {shown}",
        num_fitted=len(number) if how is None else int(how == _PADDING),
        is_cause=how is not None,
    )


def _how_many_keys(wrong: WrongOperation, number: torch.Tensor) -> str | None:
    """Say what the numbers of keys of padding [R] follow; None if each row has another."""
    longest, lengths = [], []
    for request, index in zip(wrong.rows.request.tolist(), wrong.rows.step.tolist(), strict=True):
        step = wrong.recording.steps[index]
        longest.append(int(step.position.max()) + 1)
        lengths.append(int(step.position[step.request == request].max()) + 1)
    context = torch.tensor(lengths)
    if torch.equal(number, torch.tensor(longest) - context):
        return "padding is attended to in a ragged batch"
    for multiple in _MULTIPLES:
        if torch.equal(number, -context % multiple):
            return f"padding is attended to: keys are padded with zeros to a multiple of {multiple}"
    return _PADDING if len(number) > 1 and len(number.unique()) == 1 else None
