"""Why a row may be NaN or infinite though its inputs are finite: an overflow, or memory that nobody wrote.

A cause is asserted where it says which elements, heads or rows are not finite, and these are the ones. Otherwise the
report says what was seen, and what can come to that.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.formats.taps import Kind, prefix_of
from harness.judge.compare.align import all_rows
from harness.judge.compare.evidence import guarded
from harness.judge.explain.attention.slots import cache_played_back
from harness.judge.explain.cache.contents import history
from harness.judge.explain.cache.entries import at_boundary, is_unwritten, provenance_of
from harness.judge.explain.core.formats import FLOAT8_DTYPES, name_of
from harness.judge.explain.core.wrong_operation import WrongOperation
from harness.judge.explain.products.logits import filter_of, masked
from harness.results.check import Explanation

_MATCHED = 0.9
"""Share of what is not finite that an overflow must predict, and of what is predicted that must not be finite."""


def not_finite(wrong: WrongOperation, scope: str) -> Explanation:
    """Return what overflows in the operation, or what it may have read.

    Args:
        wrong: the wrong rows.
        scope: which rows are wrong, in words.
    """
    failures = list[str]()
    reason = next(_reasons(wrong, failures))
    notes = [reason.detail, *(f"could not be tried: {item}" for item in failures)]
    return replace(
        reason,
        scope=scope,
        residual_before=float(wrong.roundings.median()),
        num_rows=len(wrong.rows),
        detail="; ".join(notes).removeprefix("; "),
    )


def _reasons(wrong: WrongOperation, failures: list[str]) -> Iterator[Explanation]:
    """Yield what can be said, what is certain first."""
    kind = wrong.operation.kind
    if wrong.operation.tap == wrong.graph.logits and bool((wrong.actual.isfinite() | masked(wrong)).all()):
        yield Explanation(cause=filter_of(wrong, masked(wrong))[0], num_explained=len(wrong.rows))
    for reasons, kinds in ((_overflows, (kind,)), (_of_cache, (Kind.CACHE,)), (_of_attention, (Kind.ATTENTION,))):
        if kind in kinds:
            with guarded(reasons.__name__.lstrip("_"), failures):
                yield from reasons(wrong)
    largest = float(wrong.expected.abs().max())
    seen = f"its largest element should be {largest:.3g}"
    yield Explanation(cause="not finite though nothing in it can overflow", detail=seen, is_cause=False)


def _overflows(wrong: WrongOperation) -> Iterator[Explanation]:
    """Yield the dtypes that overflow exactly where the engine's numbers are not finite, its own first."""
    dtypes = (wrong.dtype, torch.float16, *(FLOAT8_DTYPES if wrong.operation.kind is Kind.CACHE else ()))
    magnitudes = list(_magnitudes(wrong))
    for dtype in dict.fromkeys(dtypes):
        limit = torch.finfo(dtype).max
        for what, magnitude in magnitudes:
            if _is_overflow(wrong, magnitude > limit, is_sum="sum" in what):
                detail = f"{what} reaches {float(magnitude.max()):.3g}, the limit is {limit:.3g}"
                yield Explanation(cause=f"overflow of {name_of(dtype)}", detail=detail)


def _is_overflow(wrong: WrongOperation, predicted: torch.Tensor, *, is_sum: bool) -> bool:
    """Whether what is predicted to overflow, by element, head or row, is what is not finite."""
    is_broken = ~wrong.actual.isfinite()
    if predicted.shape != is_broken.shape:
        is_broken = is_broken.view(*predicted.shape, -1).any(dim=-1)
    if float(predicted[is_broken].double().mean()) < _MATCHED:
        return False
    # A sum of magnitudes is the most that a partial sum can reach: not each that is too large overflows.
    return is_sum or float(is_broken[predicted].double().mean()) >= _MATCHED


def _magnitudes(wrong: WrongOperation) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what may overflow, in words, and its magnitudes: [R, W] of elements, [R, N] of heads, or [R] of rows."""
    yield "what should come out", wrong.expected.abs()
    if wrong.operation.kind is Kind.LINEAR:
        weight = wrong.weight(wrong.operation.tap)
        if weight is not None and weight.shape[1] == wrong.inputs[0].flatten(1).shape[1]:
            yield "a sum of terms", wrong.inputs[0].flatten(1).abs() @ weight.abs().T
    elif wrong.operation.kind is Kind.NORM:
        yield "the sum of the squares", wrong.inputs[0].flatten(1).square().sum(dim=1)
    elif wrong.operation.kind is Kind.ATTENTION:
        scores = [view.scores().masked_fill(~view.visible(), 0).abs().amax(dim=-1).T for view in wrong.views]
        yield "a score", torch.cat(scores)
        unscaled = [score / view.scale for score, view in zip(scores, wrong.views, strict=True)]
        yield "a score before it is scaled", torch.cat(unscaled)
        sums = [(view.scores().masked_fill(~view.visible(), -torch.inf)).exp().sum(dim=-1).T for view in wrong.views]
        yield "the sum of exponentials, whose maximum is not subtracted,", torch.cat(sums)


def _of_cache(wrong: WrongOperation) -> Iterator[Explanation]:
    provenance = provenance_of(wrong)
    if is_unwritten(wrong):
        yield Explanation(
            cause=f"never written: no recorded step wrote the slot{at_boundary(wrong)}", provenance=provenance
        )
    is_nan = bool(wrong.actual.isnan().all(dim=1).all())
    yield Explanation(
        cause=f"the slot holds what no recorded row has{at_boundary(wrong)}",
        detail="NaN throughout, as memory that was never written may" if is_nan else "some of it is not finite",
        is_cause=False,
        provenance=provenance,
    )


def _of_attention(wrong: WrongOperation) -> Iterator[Explanation]:
    played = next(iter(cache_played_back(wrong)), None)
    if played is not None:
        provenance = played.provenance() if played.provenance else None
        yield Explanation(cause=played.cause, detail=played.detail, provenance=provenance)
    for view in wrong.views:
        key = history(wrong, view, f"{prefix_of(wrong.operation.tap)}k_cache", view.key)
        if key is not None and not bool(key.isfinite().all()):
            yield Explanation(cause="reads slots of its own history that are not finite when read back: see k_cache")
    finite = "keys, values and scores of the request are finite"
    if _are_rows_with_room(wrong):
        rows = "the rows whose next slot exists and is not written yet, and no others"
        yield Explanation(cause="reads past the context length: slots that nobody wrote", detail=f"{finite}; {rows}")
    yield Explanation(
        cause="not finite though all that it should read is: reads past the context length, or sees no key at all",
        detail=finite,
        is_cause=False,
    )


def _are_rows_with_room(wrong: WrongOperation) -> bool:
    """Whether the rows that are not finite are those of their kind after whose last token a slot is free.

    Of their kind: decode rows, where all of the wrong ones are. Only where some row has no such slot does that say
    anything.
    """
    memory, size = wrong.slot_history, wrong.slot_history.block_size
    if not memory.is_known or size is None:
        return False
    wrong_rows = set(wrong.rows.identities())
    with_room, without = set[tuple[int, int, int]](), set[tuple[int, int, int]]()
    for step in wrong.recording.steps:
        if not step.has(wrong.operation.tap) or step.block_tables is None:
            continue
        for request in step.request.unique().tolist():
            last = int(step.position[step.request == request].max())
            slots = memory.slots(memory.table(step.index, request), last + 2)
            is_free = len(slots) > last + 1 and memory.writer(slots[last + 1], step.index) is None
            of_request = all_rows(step).select(step.request == request)
            if len(of_request) == 1 or not wrong.are_single:
                (with_room if is_free else without).update(of_request.identities())
    return wrong_rows == with_room and bool(without)
