"""Ways in which attention reads other slots than the request's: stale or shared blocks, another table, past its end.

`T` query rows, `S` history rows, `M` known rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from harness.formats.taps import prefix_of
from harness.judge.compare.align import Prefixes
from harness.judge.explain.cache.content_index import describe_writes
from harness.judge.explain.cache.replay import CacheRead, history, in_order, provenance_of, replayed_reads, row_keys
from harness.judge.explain.core.drafts import is_draft_of, name_of_row
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.results.check import Provenance

_NOWHERE = -1
"""A slot that does not exist: zeros."""

_MAX_TRIED = 4096
"""Pairs of a block that is read elsewhere and the block that is read in its place, up to which all are tried."""

_Extent = Callable[[int, int], int]
"""From a step and the length of a history to how many slots are read."""


def cache_played_back(failure: Failure) -> Iterator[Hypothesis]:
    """Attention is right: the engine's own block table leads to slots that something else was written to."""
    memory = failure.slot_history
    reads = (
        replayed_reads(failure, lambda step, r, n: memory.slots(memory.table(step, r), n)) if memory.is_known else None
    )
    wrong = _wrong_places(failure, reads or [])
    if not reads or not wrong:
        return
    read, position = wrong[0]
    played = _filled(failure, reads)
    places = [(at, item.writes[at]) for item, at in wrong if item is read]
    yield Hypothesis(
        cause=_cause_of_content(failure, wrong),
        output=in_order(failure, played, lambda each: each.view.attend()),
        detail=f"request {read.request} in step {read.step}; {describe_writes(places)}",
        provenance=lambda: provenance_of(failure, read.step, read.request, position, read.view.key[position].flatten()),
    )


def _reading_nothing(failure: Failure, reads: Sequence[CacheRead]) -> torch.Tensor:
    """[R] bool: rows that read a slot nobody wrote."""
    unknown, keys = torch.zeros(len(failure.rows), dtype=torch.bool), row_keys(failure.rows)
    for read in reads:
        first = next((at for at, write in enumerate(read.writes) if write is None), len(read.writes))
        unknown |= torch.isin(keys, row_keys(read.view.rows)) & (failure.positions >= first)
    return unknown


def _filled(failure: Failure, reads: Sequence[CacheRead]) -> list[CacheRead]:
    """Put what the cache gives back in the places that nobody wrote if that was recorded."""
    prefix, filled = prefix_of(failure.operation.tap), []
    for read in reads:
        empty = torch.tensor([write is None for write in read.writes])
        view = read.view
        key = history(failure, view, f"{prefix}k_cache", view.key)
        value = history(failure, view, f"{prefix}v_cache", view.value)
        if bool(empty.any()) and key is not None and value is not None:
            where = empty[:, None, None]
            view = replace(view, key=torch.where(where, key, view.key), value=torch.where(where, value, view.value))
        filled.append(replace(read, view=view))
    return filled


def _wrong_places(failure: Failure, reads: Sequence[CacheRead]) -> list[tuple[CacheRead, int]]:
    """Places of the cache whose last writer had other tokens before it than the reader has."""
    prefixes = Prefixes(failure.recording.manifest.requests)
    wrong = []
    for read in reads:
        own = prefixes.up_to(read.request, len(read.writes)).tolist()
        for at, write in enumerate(read.writes):
            if write is None or prefixes.at(write.request, write.position) != own[at]:
                wrong.append((read, at))
    return wrong


def _cause_of_content(failure: Failure, wrong: Sequence[tuple[CacheRead, int]]) -> str:
    """Say how the slots came to hold what they hold."""
    read, position = wrong[0]
    memory, write = failure.slot_history, read.writes[position]
    misplaced = [item for step in range(read.step + 1) for item in memory.misplaced(step)]
    if any(request == read.request and at == position for request, at, _, _ in misplaced) or (
        write is not None and any((request, at) == (write.request, write.position) for request, at, _, _ in misplaced)
    ):
        return "K and V are written to a wrong slot: the slot mapping does not follow the block table"
    if write is None:
        return "reads a slot that nobody wrote"
    if is_draft_of(failure.recording, write.request, read.request):
        return f"attends to {name_of_row(failure.recording, write.position, write.step)}"
    if write.request == read.request:
        return "reads a slot that holds another position of the same request"
    size = memory.block_size or 1
    block = memory.slots(memory.table(read.step, read.request), position + 1)[position] // size
    others = [
        request
        for request, table in (failure.recording.steps[read.step].block_tables or {}).items()
        if block in table and request != read.request
    ]
    if others:
        return "a block belongs to two requests of different content at once: shared, freed or given out wrongly"
    return "a block holds what another request left there: stale block taken as a hit, or not written"


def other_block_table(failure: Failure) -> Iterator[Hypothesis]:
    """The history of another request of the step is read."""
    memory = failure.slot_history
    if not memory.is_known:
        return
    for shift, name in ((1, "next"), (-1, "previous")):

        def slots(step: int, request: int, count: int, shift: int = shift) -> list[int]:
            return memory.slots(_neighbour(failure, step, request, shift), count)

        reads = replayed_reads(failure, slots)
        if reads:
            read = reads[0]
            yield Hypothesis(
                cause="reads the block table of another request",
                output=in_order(failure, reads, lambda each: each.view.attend()),
                detail=f"of the {name} one in the batch",
                unknown=_reading_nothing(failure, reads),
                provenance=lambda read=read: _foreign(failure, read),  # type: ignore[misc]
            )
    reads = replayed_reads(failure, lambda step, r, n: _padded(memory.slots(_table_before(failure, step, r), n), n))
    if reads:
        yield Hypothesis(
            cause="reads through the block table of the step before: its own step's new blocks are read as zeros",
            output=in_order(failure, reads, lambda each: each.view.attend()),
        )
    reads = replayed_reads(failure, lambda step, r, n: memory.slots(memory.table(step, r)[::-1], n))
    if reads:
        yield Hypothesis(
            cause="reads the blocks of its table in the reverse order",
            output=in_order(failure, reads, lambda each: each.view.attend()),
        )


def _table_before(failure: Failure, step: int, request: int) -> list[int]:
    """Return a request's block table as it was in its last step before this one; empty if there is none."""
    steps = [item for item in failure.recording.steps[:step] if request in (item.block_tables or {})]
    return (steps[-1].block_tables or {})[request] if steps else []


def _padded(slots: Sequence[int], length: int) -> list[int]:
    return [*slots, *([_NOWHERE] * (length - len(slots)))]


def _neighbour(failure: Failure, step: int, request: int, shift: int) -> list[int]:
    tables = failure.recording.steps[step].block_tables or {}
    order = [fromkey for fromkey in dict.fromkeys(failure.recording.steps[step].request.tolist()) if fromkey in tables]
    return tables[order[(order.index(request) + shift) % len(order)]] if request in order else []


def _foreign(failure: Failure, read: CacheRead) -> Provenance:
    return provenance_of(failure, read.step, read.request, 0, read.view.key[0].flatten())


def past_the_context(failure: Failure) -> Iterator[Hypothesis]:
    """Slots after the request's last token are read as well."""
    memory, size = failure.slot_history, failure.slot_history.block_size or 1
    if not memory.is_known:
        return

    def to_end_of_block(_step: int, length: int) -> int:
        return -(-length // size) * size

    def to_longest(step: int, _length: int) -> int:
        return int(failure.recording.steps[step].position.max()) + 1

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

        reads = replayed_reads(failure, slots)
        if reads and any(len(read.writes) > int(read.view.rows.position.max()) + 1 for read in reads):
            yield Hypothesis(
                cause=cause,
                output=in_order(failure, reads, lambda each: each.view.attend(visible=_all_but_later(each))),
                detail=name,
            )


def _all_but_later(read: CacheRead) -> torch.Tensor:
    """[T, S] bool: the causal mask for what the request has, and everything after it for all rows."""
    last = int(read.view.rows.position.max())
    return read.view.visible() | (torch.arange(len(read.view.key)) > last)


def wrong_block(failure: Failure) -> Iterator[Hypothesis]:
    """One block of the history is read from where another one is; which, is fitted to the first row and held to."""
    memory = failure.slot_history
    if not memory.is_known or memory.block_size is None:
        return
    view = failure.views[0]
    request, step = int(view.rows.request[0]), int(view.rows.step[0])
    table = memory.table(step, request)
    known = sorted({slot // memory.block_size for slot in memory.written_slots(step)} | set(table) | {0})
    used = -(-(int(view.rows.position[0]) + 1) // memory.block_size)
    if used * len(known) > _MAX_TRIED:
        return
    first = view.select(torch.tensor([0]))
    probe = replace(failure, views=(first,), rows=first.rows, actual=failure.actual[:1])
    best: tuple[float, int, int] | None = None
    for at in range(min(used, len(table))):
        for block in known:
            if block == table[at]:
                continue
            replaced = [*table[:at], block, *table[at + 1 :]]
            reads = replayed_reads(probe, lambda _step, _request, n, replaced=replaced: memory.slots(replaced, n))  # type: ignore[misc]
            if reads:
                error = float((reads[0].view.attend() - probe.actual).norm())
                best = min(best or (torch.inf, 0, 0), (error, at, block))
    if best is not None:
        _, at, block = best
        yield from _block_replaced(failure, at, block, table, request)


def _block_replaced(failure: Failure, at: int, block: int, table: Sequence[int], request: int) -> Iterator[Hypothesis]:
    memory = failure.slot_history
    source = table.index(block) if block in table else None

    def slots(step: int, each: int, count: int) -> list[int]:
        own = list(memory.table(step, each))
        if len(own) > at:
            own[at] = own[source] if source is not None and source < len(own) else block
        return memory.slots(own, count)

    reads = replayed_reads(failure, slots)
    if not reads:
        return
    position = at * (memory.block_size or 1)
    read = reads[0]
    whose = f"its own block {source}" if source is not None else f"physical block {block}"
    yield Hypothesis(
        cause="reads one block of its history from a wrong place",
        output=in_order(failure, reads, lambda each: each.view.attend()),
        detail=f"block {at} of the table is read from {whose}",
        freedom=2,  # which block, and what is read in its place
        provenance=lambda: provenance_of(failure, read.step, request, position, read.view.key[position].flatten()),
    )
