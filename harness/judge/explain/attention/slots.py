"""Attention reads other slots than the request's: another block table, stale blocks, slots past its end, old drafts.

`T` query rows, `S` history rows, `D` rows that were given up, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from harness.formats.taps import prefix_of
from harness.judge.compare.align import Prefixes
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.cache.contents import (
    CacheRead,
    describe_writes,
    history,
    in_order,
    provenance_of,
    replayed_reads,
    row_keys,
)
from harness.judge.explain.core.drafts import GivenUp, computed_before, given_up, is_draft_of, name_of_row
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation, gathered
from harness.results.check import Provenance

_NOWHERE = -1
"""A slot that does not exist: zeros."""
_Extent = Callable[[int, int], int]
"""From a step and the length of a history to how many slots are read."""


def cache_played_back(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Attention is right: the engine's own block table leads to slots that something else was written to.

    Causes: K and V are written to a wrong slot: the slot mapping does not follow the block table; a block belongs to
    two requests ...; a block holds what another request left there; reads a slot that nobody wrote; attends to a
    rejected draft .
    """
    memory = wrong.slot_history
    reads = (
        replayed_reads(wrong, lambda step, r, n: memory.slots(memory.table(step, r), n)) if memory.is_known else None
    )
    misplaced = _wrong_places(wrong, reads or [])
    if not reads or not misplaced:
        return
    read, position = misplaced[0]
    played = _filled(wrong, reads)
    places = [(at, item.writes[at]) for item, at in misplaced if item is read]
    yield Hypothesis(
        cause=_cause_of_content(wrong, misplaced),
        output=in_order(wrong, played, lambda item: item.view.attend()),
        detail=f"request {read.request} in step {read.step}; {describe_writes(places)}",
        provenance=lambda: provenance_of(wrong, read.step, read.request, position, read.view.key[position].flatten()),
    )


def _reading_nothing(wrong: WrongOperation, reads: Sequence[CacheRead]) -> torch.Tensor:
    """[R] bool: rows that read a slot nobody wrote."""
    unknown, keys = torch.zeros(len(wrong.rows), dtype=torch.bool), row_keys(wrong.rows)
    for read in reads:
        first = next((at for at, write in enumerate(read.writes) if write is None), len(read.writes))
        unknown |= torch.isin(keys, row_keys(read.view.rows)) & (wrong.positions >= first)
    return unknown


def _filled(wrong: WrongOperation, reads: Sequence[CacheRead]) -> list[CacheRead]:
    """Put what the cache gives back in the places that nobody wrote if that was recorded."""
    prefix, filled = prefix_of(wrong.operation.tap), []
    for read in reads:
        empty = torch.tensor([write is None for write in read.writes])
        view = read.view
        key = history(wrong, view, f"{prefix}k_cache", view.key)
        value = history(wrong, view, f"{prefix}v_cache", view.value)
        if bool(empty.any()) and key is not None and value is not None:
            where = empty[:, None, None]
            view = replace(view, key=torch.where(where, key, view.key), value=torch.where(where, value, view.value))
        filled.append(replace(read, view=view))
    return filled


def _wrong_places(wrong: WrongOperation, reads: Sequence[CacheRead]) -> list[tuple[CacheRead, int]]:
    """Places of the cache whose last writer had other tokens before it than the reader has."""
    prefixes = Prefixes(wrong.recording.manifest.requests)
    misplaced = []
    for read in reads:
        expected = prefixes.up_to(read.request, len(read.writes)).tolist()
        for at, write in enumerate(read.writes):
            if write is None or prefixes.at(write.request, write.position) != expected[at]:
                misplaced.append((read, at))
    return misplaced


def _cause_of_content(wrong: WrongOperation, stale: Sequence[tuple[CacheRead, int]]) -> str:
    """Say how the slots came to hold what they hold."""
    read, position = stale[0]
    memory, write = wrong.slot_history, read.writes[position]
    misplaced = [item for step in range(read.step + 1) for item in memory.misplaced(step)]
    if any(request == read.request and at == position for request, at, _, _ in misplaced) or (
        write is not None and any((request, at) == (write.request, write.position) for request, at, _, _ in misplaced)
    ):
        return "K and V are written to a wrong slot: the slot mapping does not follow the block table"
    if write is None:
        return "reads a slot that nobody wrote"
    if is_draft_of(wrong.recording, write.request, read.request):
        return f"attends to {name_of_row(wrong.recording, write.position, write.step)}"
    if write.request == read.request:
        return "reads a slot that holds another position of the same request"
    size = memory.block_size or 1
    block = memory.slots(memory.table(read.step, read.request), position + 1)[position] // size
    others = [
        request
        for request, table in (wrong.recording.steps[read.step].block_tables or {}).items()
        if block in table and request != read.request
    ]
    if others:
        return "a block belongs to two requests of different content at once: shared, freed or given out wrongly"
    return "a block holds what another request left there: stale block taken as a hit, or not written"


def other_block_table(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The history of another request of the step is read.

    Causes: reads the block table of another request; through the block table of the step before; reads the blocks of
    its table in the reverse order.
    """
    memory = wrong.slot_history
    if not memory.is_known:
        return
    for shift, name in ((1, "next"), (-1, "previous")):

        def slots(step: int, request: int, count: int, shift: int = shift) -> list[int]:
            return memory.slots(_neighbour(wrong, step, request, shift), count)

        reads = replayed_reads(wrong, slots)
        if reads:
            read = reads[0]
            yield Hypothesis(
                cause="reads the block table of another request",
                output=in_order(wrong, reads, lambda item: item.view.attend()),
                detail=f"of the {name} one in the batch",
                unknown=_reading_nothing(wrong, reads),
                provenance=lambda read=read: _foreign(wrong, read),  # type: ignore[misc]
            )
    reads = replayed_reads(wrong, lambda step, r, n: _padded(memory.slots(_table_before(wrong, step, r), n), n))
    if reads:
        yield Hypothesis(
            cause="reads through the block table of the step before: its own step's new blocks are read as zeros",
            output=in_order(wrong, reads, lambda item: item.view.attend()),
        )
    reads = replayed_reads(wrong, lambda step, r, n: memory.slots(memory.table(step, r)[::-1], n))
    if reads:
        yield Hypothesis(
            cause="reads the blocks of its table in the reverse order",
            output=in_order(wrong, reads, lambda item: item.view.attend()),
        )


def _table_before(wrong: WrongOperation, step: int, request: int) -> list[int]:
    """Return a request's block table as it was in its last step before this one; empty if there is none."""
    steps = [item for item in wrong.recording.steps[:step] if request in (item.block_tables or {})]
    return (steps[-1].block_tables or {})[request] if steps else []


def _padded(slots: Sequence[int], length: int) -> list[int]:
    return [*slots, *([_NOWHERE] * (length - len(slots)))]


def _neighbour(wrong: WrongOperation, step: int, request: int, shift: int) -> list[int]:
    tables = wrong.recording.steps[step].block_tables or {}
    order = [fromkey for fromkey in dict.fromkeys(wrong.recording.steps[step].request.tolist()) if fromkey in tables]
    return tables[order[(order.index(request) + shift) % len(order)]] if request in order else []


def _foreign(wrong: WrongOperation, read: CacheRead) -> Provenance:
    return provenance_of(wrong, read.step, read.request, 0, read.view.key[0].flatten())


def past_the_context(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Reads past the context length; padding is attended to in a ragged batch."""
    memory, size = wrong.slot_history, wrong.slot_history.block_size or 1
    if not memory.is_known:
        return

    def to_end_of_block(_step: int, length: int) -> int:
        return -(-length // size) * size

    def to_longest(step: int, _length: int) -> int:
        return int(wrong.recording.steps[step].position.max()) + 1

    def one_more(_step: int, length: int) -> int:
        return length + 1

    past, padding = "reads past the context length", "padding is attended to in a ragged batch"
    for cause, name, extent, reaches in (
        (padding, "zeros up to the longest of the batch", to_longest, False),
        (past, "one slot more", one_more, True),
        (past, "to the end of its block", to_end_of_block, True),
        (past, "to the longest of the batch", to_longest, True),
    ):

        def slots(
            step: int, request: int, length: int, extent: _Extent = extent, reaches: bool = reaches
        ) -> Sequence[int]:
            end = extent(step, length)
            return _padded(memory.slots(memory.table(step, request), end if reaches else length), end)

        reads = replayed_reads(wrong, slots)
        if reads and any(len(read.writes) > int(read.view.rows.position.max()) + 1 for read in reads):
            yield Hypothesis(
                cause=cause,
                output=in_order(wrong, reads, lambda item: item.view.attend(visible=_all_but_later(item))),
                detail=name,
            )


def _all_but_later(read: CacheRead) -> torch.Tensor:
    """[T, S] bool: the causal mask for what the request has, and everything after it for all rows."""
    last = int(read.view.rows.position.max())
    return read.view.visible() | (torch.arange(len(read.view.key)) > last)


@dataclass(frozen=True, slots=True)
class _Stale:
    """Rows that were given up before a query's step."""

    position: torch.Tensor
    """[D] int64."""
    step: torch.Tensor
    key: torch.Tensor | None
    """[D, K, H] float64; None: the keys are the history's own."""
    value: torch.Tensor


def rejected_drafts(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Rows that the request gave up are read: in their own places, besides all others, or where a ring keeps them.

    Causes: attends to a rejected draft, position *p*, written in step *n* (under `rewound`: to a token that was taken
    back): in the place of the position's own key and value, or of its value alone; behind the context; besides the
    history; in a sliding window's ring. No causal mask: a row sees all tokens of its step, rejected drafts among them.
    """
    drafts = {int(view.rows.request[0]): given_up(wrong.recording, int(view.rows.request[0])) for view in wrong.views}
    if not any(drafts.values()):
        return
    for detail, attend in _WAYS.items():
        for which in (_all, _latest, _first_of_each):
            output, first = wrong.expected.clone(), list[tuple[int, int]]()
            for at, query in enumerate(wrong.single_rows()):
                stale = _stale(wrong, which(drafts[int(query.rows.request)], int(query.rows.step)))
                read = None if stale is None else attend(query, stale)
                if stale is not None and read is not None:
                    output[at] = read[0]
                    first.append((int(stale.position[0]), int(stale.step[0])))
            if first:
                cause = f"attends to {name_of_row(wrong.recording, *first[0])}"
                yield Hypothesis(cause=cause, output=output, detail=detail)
    output, has_stale = wrong.expected.clone(), False
    for at, query in enumerate(wrong.single_rows()):
        beside = [draft for draft in drafts[int(query.rows.request)] if draft.step == int(query.rows.step)]
        stale, seen = _stale(wrong, beside), query.is_computed
        has_stale = has_stale or stale is not None
        output[at] = (query.attend(visible=seen) if stale is None else _besides(query, stale, seen))[0]
    if not has_stale:
        return
    detail = "rejected drafts of the step among them"
    yield Hypothesis(cause="no causal mask: a row sees all tokens of its step", output=output, detail=detail)


def nothing_forgotten(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """All rows that the request ever computed are read, or the latest of a window: it never went back.

    Causes: attends to rejected drafts, or to tokens that were taken back: all that the request has computed is still in
    its cache.
    """
    first = next((item for view in wrong.views for item in _of(wrong, view)), None)
    if first is None:
        return
    output = wrong.expected.clone()
    for at, query in enumerate(wrong.single_rows()):
        request, position, step = (int(item) for item in (query.rows.request, query.rows.position, query.rows.step))
        rows = computed_before(wrong.recording, request, position, step)
        rows = rows.select(torch.arange(max(0, len(rows) - (query.window or len(rows))), len(rows)))
        key, value = (gathered(wrong.locator, tap, rows) for tap in wrong.operation.inputs[1:])
        if key is None or value is None:
            return
        every = torch.ones(1, len(rows), dtype=torch.bool)
        key, value = key.unflatten(1, query.key.shape[1:]), value.unflatten(1, query.value.shape[1:])
        output[at] = query.attend(visible=every, key=key, value=value)[0]
    name = name_of_row(wrong.recording, int(first.rows.position[0]), int(first.rows.step[0]))
    detail = "the request never went back: all that it has computed is in its cache"
    yield Hypothesis(cause=f"attends to {name}", output=output, detail=detail)


def _of(wrong: WrongOperation, view: AttentionContext) -> list[GivenUp]:
    """Return what the request of a view had given up before its last row."""
    return _all(given_up(wrong.recording, int(view.rows.request[0])), int(view.rows.step.max()))


def _all(drafts: Sequence[GivenUp], step: int) -> list[GivenUp]:
    return [draft for draft in drafts if draft.step < step]


def _latest(drafts: Sequence[GivenUp], step: int) -> list[GivenUp]:
    return _all(drafts, step)[-1:]


def _first_of_each(drafts: Sequence[GivenUp], step: int) -> list[GivenUp]:
    return [GivenUp(item.draft, item.rows.select(torch.tensor([0]))) for item in _all(drafts, step)]


def _stale(wrong: WrongOperation, before: Sequence[GivenUp]) -> _Stale | None:
    """Return the keys and values of what was given up before a query's step; None if that is nothing."""
    _, key, value = wrong.operation.inputs
    keys, values = ([gathered(wrong.locator, tap, item.rows) for item in before] for tap in (key, value))
    if not before or any(item is None for item in (*keys, *values)):
        return None
    view = wrong.views[0]
    key_D, value_D = (torch.cat([x for x in item if x is not None]) for item in (keys, values))
    return _Stale(
        torch.cat([item.rows.position for item in before]),
        torch.cat([item.rows.step for item in before]),
        key_D.unflatten(1, view.key.shape[1:]),
        value_D.unflatten(1, view.value.shape[1:]),
    )


def _put(query: AttentionContext, stale: _Stale, places: torch.Tensor) -> torch.Tensor | None:
    """Attend with discarded keys and values in some places of the history; None if no place is in it."""
    there = (places >= 0) & (places <= int(query.rows.position[0]))
    if not bool(there.any()):
        return None
    key, value = query.key.clone(), query.value.clone()
    value[places[there]] = stale.value[there]
    if stale.key is not None:
        key[places[there]] = stale.key[there]
    return query.attend(key=key, value=value)


def _behind(query: AttentionContext, stale: _Stale) -> torch.Tensor | None:
    later = stale.position > int(query.rows.position[0])
    if not bool(later.any()):
        return None
    assert stale.key is not None
    return _besides(query, _Stale(stale.position[later], stale.step[later], stale.key[later], stale.value[later]))


def _besides(query: AttentionContext, stale: _Stale, seen: torch.Tensor | None = None) -> torch.Tensor:
    assert stale.key is not None
    seen = query.visible() if seen is None else seen
    visible = torch.cat((seen, torch.ones(1, len(stale.key), dtype=torch.bool)), dim=1)
    key, value = torch.cat((query.key, stale.key)), torch.cat((query.value, stale.value))
    return query.attend(visible=visible, key=key, value=value)


_WAYS: dict[str, Callable[[AttentionContext, _Stale], torch.Tensor | None]] = {
    "its key and value stand where the position's own were to be": lambda query, stale: _put(
        query, stale, stale.position
    ),
    "its value stands where the position's own was to be": lambda query, stale: _put(
        query, replace(stale, key=None), stale.position
    ),
    "the context is as long as it was before the rejection": _behind,
    "its key and value are there besides the history's own": _besides,
    "its key and value stand where the sliding window's ring keeps older ones": lambda query, stale: (
        None if query.window is None else _put(query, stale, stale.position - query.window)
    ),
}
"""The context [1, N*H] of one query that reads what was given up; None where nothing of it would be read."""
