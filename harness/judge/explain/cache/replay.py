"""The history that attention would have read, gathered by slots, as the engine's own record has it.

`T` query rows, `S` history rows, `M` known rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from harness.judge.compare.align import Rows
from harness.judge.compare.evidence import AttentionContext
from harness.judge.compare.sequences import Write
from harness.judge.explain.cache.content_index import ContentIndex
from harness.judge.explain.core.failure import Failure, latest
from harness.results.check import Provenance


@dataclass(frozen=True, slots=True)
class CacheRead:
    """The rows of one request in one step, and what they would read."""

    view: AttentionContext
    writes: list[Write | None]
    """Who wrote what each position of the history is read from."""
    step: int
    request: int


def replayed_reads(failure: Failure, slots_of: Callable[[int, int, int], Sequence[int]]) -> list[CacheRead] | None:
    """Play the cache back: for (step, request, number of positions), `slots_of` gives the slots that are read."""
    keys, values = (failure.operation.inputs[1], failure.operation.inputs[2])
    reads = []
    for view in failure.views:
        for step in dict.fromkeys(view.rows.step.tolist()):
            here = (view.rows.step == step).nonzero()[:, 0]
            part = view.select(here)
            request, length = int(part.rows.request[0]), int(part.rows.position.max()) + 1
            slots = slots_of(step, request, length)
            writes = [failure.slot_history.writer(slot, step) for slot in slots]
            writes += [None] * (length - len(writes))
            key, value = failure.slot_history.content(writes, keys), failure.slot_history.content(writes, values)
            if key is None or value is None:
                return None
            part = replace(
                part,
                key=key.unflatten(1, part.key.shape[1:]),
                value=value.unflatten(1, part.value.shape[1:]),
                key_step=torch.full((len(writes),), -1, dtype=torch.int64),
            )
            reads.append(CacheRead(part, writes, step, request))
    return reads


def in_order(failure: Failure, reads: Sequence[CacheRead], attend: Callable[[CacheRead], torch.Tensor]) -> torch.Tensor:
    """[R, N*H] in the order of the failure's rows; reads are grouped by request and step."""
    output = torch.empty_like(failure.expected)
    keys = row_keys(failure.rows)
    for read in reads:
        output[torch.isin(keys, row_keys(read.view.rows))] = attend(read)
    return output


def row_keys(rows: Rows) -> torch.Tensor:
    """Return [rows] int64: one number for each request, position and step."""
    return (rows.step << 42) + (rows.request << 21) + rows.position


def history(
    failure: Failure,
    view: AttentionContext,
    tap: str,
    like: torch.Tensor,
    *,
    request: int | None = None,
    shift: int = 0,
) -> torch.Tensor | None:
    """[S, K, H], the shape of `like`: a tap at the rows of a view's history, or of another request so far on."""
    position = torch.arange(len(view.key)) + shift
    whose = torch.full_like(position, int(view.rows.request[0]) if request is None else request)
    rows = Rows(request=whose, position=position, step=view.key_step)
    tensor = latest(failure.locator, tap, rows) if bool((position >= 0).all()) else None
    return None if tensor is None or tensor.shape[1] != like[0].numel() else tensor.view_as(like)


def contents_of(failure: Failure) -> ContentIndex:
    """Return all keys and values that were recorded of the failure's layer."""
    return ContentIndex(failure.recording, failure.graph, failure.operation.layer or 0, failure.dtype)


def provenance_of(failure: Failure, step: int, request: int, position: int, content: torch.Tensor) -> Provenance:
    """Trace one place of a request's history that holds `content` [K*H], as of a step."""
    return contents_of(failure).provenance(
        failure.slot_history,
        step=step,
        request=request,
        position=position,
        content=content,
        meant=_meant(failure, request, position),
        head_dim=failure.views[0].key.shape[-1],
    )


def _meant(failure: Failure, request: int, position: int) -> torch.Tensor | None:
    for view in failure.views:
        if int(view.rows.request[0]) == request and position < len(view.key):
            return view.key[position].flatten()
    return None
