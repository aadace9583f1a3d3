"""Ways in which attention reads what was given up: keys and values of rejected drafts that are still in the cache.

`S` history rows, `D` rows that were given up, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import single_rows
from harness.judge.explain.core.drafts import GivenUp, computed_before, given_up, name_of_row
from harness.judge.explain.core.failure import Failure, gathered
from harness.judge.explain.core.hypothesis import Hypothesis


@dataclass(frozen=True, slots=True)
class _Stale:
    """Rows that were given up before a query's step."""

    position: torch.Tensor
    """[D] int64."""
    step: torch.Tensor
    key: torch.Tensor | None
    """[D, K, H] float64; None: the keys are the history's own."""
    value: torch.Tensor


def rejected_drafts(failure: Failure) -> Iterator[Hypothesis]:
    """Rows that the request gave up are read: in their own places, besides all others, or where a ring keeps them."""
    drafts = {
        int(view.rows.request[0]): given_up(failure.recording, int(view.rows.request[0])) for view in failure.views
    }
    if not any(drafts.values()):
        return
    for detail, attend in _WAYS.items():
        for which in (_all, _latest, _first_of_each):
            output, first = failure.expected.clone(), list[tuple[int, int]]()
            for at, query in enumerate(single_rows(failure)):
                stale = _stale(failure, which(drafts[int(query.rows.request)], int(query.rows.step)))
                read = None if stale is None else attend(query, stale)
                if stale is not None and read is not None:
                    output[at] = read[0]
                    first.append((int(stale.position[0]), int(stale.step[0])))
            if first:
                cause = f"attends to {name_of_row(failure.recording, *first[0])}"
                yield Hypothesis(cause=cause, output=output, detail=detail)


def nothing_forgotten(failure: Failure) -> Iterator[Hypothesis]:
    """All rows that the request ever computed are read, or the latest of a window: it never went back."""
    first = next((item for view in failure.views for item in _of(failure, view)), None)
    if first is None:
        return
    output = failure.expected.clone()
    for at, query in enumerate(single_rows(failure)):
        request, position, step = (int(item) for item in (query.rows.request, query.rows.position, query.rows.step))
        rows = computed_before(failure.recording, request, position, step)
        rows = rows.select(torch.arange(max(0, len(rows) - (query.window or len(rows))), len(rows)))
        key, value = (gathered(failure.locator, tap, rows) for tap in failure.operation.inputs[1:])
        if key is None or value is None:
            return
        every = torch.ones(1, len(rows), dtype=torch.bool)
        key, value = key.unflatten(1, query.key.shape[1:]), value.unflatten(1, query.value.shape[1:])
        output[at] = query.attend(visible=every, key=key, value=value)[0]
    name = name_of_row(failure.recording, int(first.rows.position[0]), int(first.rows.step[0]))
    detail = "the request never went back: all that it has computed is in its cache"
    yield Hypothesis(cause=f"attends to {name}", output=output, detail=detail)


def _of(failure: Failure, view: AttentionContext) -> list[GivenUp]:
    """Return what the request of a view had given up before its last row."""
    return _all(given_up(failure.recording, int(view.rows.request[0])), int(view.rows.step.max()))


def _all(drafts: Sequence[GivenUp], step: int) -> list[GivenUp]:
    return [draft for draft in drafts if draft.step < step]


def _latest(drafts: Sequence[GivenUp], step: int) -> list[GivenUp]:
    return _all(drafts, step)[-1:]


def _first_of_each(drafts: Sequence[GivenUp], step: int) -> list[GivenUp]:
    return [GivenUp(item.draft, item.rows.select(torch.tensor([0]))) for item in _all(drafts, step)]


def _stale(failure: Failure, before: Sequence[GivenUp]) -> _Stale | None:
    """Return the keys and values of what was given up before a query's step; None if that is nothing."""
    _, key, value = failure.operation.inputs
    keys, values = ([gathered(failure.locator, tap, item.rows) for item in before] for tap in (key, value))
    if not before or any(item is None for item in (*keys, *values)):
        return None
    view = failure.views[0]
    key_D, value_D = (torch.cat([x for x in item if x is not None]) for item in (keys, values))
    return _Stale(
        torch.cat([item.rows.position for item in before]),
        torch.cat([item.rows.step for item in before]),
        key_D.unflatten(1, view.key.shape[1:]),
        value_D.unflatten(1, view.value.shape[1:]),
    )


def _put(query: AttentionContext, stale: _Stale, places: torch.Tensor) -> torch.Tensor | None:
    """Attend with what was given up at some places of the history."""
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


def _besides(query: AttentionContext, stale: _Stale) -> torch.Tensor:
    assert stale.key is not None
    visible = torch.cat((query.visible(), torch.ones(1, len(stale.key), dtype=torch.bool)), dim=1)
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
