"""The history that attention reads: queries of one request with the keys and values recorded before them.

Where a request begins past position 0, its past was found in the cache: it is what other requests with the same tokens
have recorded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from harness.compare.align import Rows, step_rows, take
from harness.compare.prefixes import Prefixes
from harness.oracle.replay import AttentionInputs
from harness.recording import Step
from harness.taps import Operation


def attention_inputs(
    operation: Operation, steps: Sequence[Step], prefixes: Prefixes
) -> Iterator[tuple[Rows, torch.Tensor, AttentionInputs]]:
    """Yield, per request and epoch, the rows, the engine's context [T, N*H], and the inputs of the replay.

    A new *epoch* begins where a request computes a position again (preempted and resumed): from there on its history is
    what the new epoch wrote over what the earlier ones left.
    """
    query, key, value = operation.inputs
    needed = (operation.tap, query, key, value)
    with_taps = [step for step in steps if all(step.has(tap) for tap in needed)]
    for request in _requests(with_taps):
        rows, (context, queries, keys, values) = _rows_of_request(with_taps, request, needed)
        inherited = _inherited(with_taps, rows, (key, value), prefixes)
        yield from _epochs(rows, context, queries, keys, values, inherited)


def _requests(steps: Sequence[Step]) -> list[int]:
    return sorted({int(request) for step in steps for request in step.request.unique()})


def _rows_of_request(steps: Sequence[Step], request: int, taps: Sequence[str]) -> tuple[Rows, list[torch.Tensor]]:
    """Collect the rows of one request that have all of the taps, in the order in which they were computed."""
    identities: list[Rows] = []
    columns: list[list[torch.Tensor]] = [[] for _ in taps]
    for step in steps:
        wanted = (step.request == request).nonzero()[:, 0]
        if not len(wanted):
            continue
        taken = [take(step, tap, wanted) for tap in taps]
        complete = torch.ones(len(wanted), dtype=torch.bool)
        for _, found in taken:
            complete &= True if found is None else found
        position = step.position.long()[wanted][complete]
        identities.append(
            Rows(
                request=torch.full_like(position, request),
                position=position,
                step=torch.full_like(position, step.index),
            )
        )
        for column, (tensor, found) in zip(columns, taken, strict=True):
            column.append(tensor[complete if found is None else complete[found]])
    return Rows.concat(identities), [torch.cat(column) for column in columns]


@dataclass(frozen=True, slots=True)
class _Past:
    """Keys and values at some positions."""

    position: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _inherited(steps: Sequence[Step], rows: Rows, taps: Sequence[str], prefixes: Prefixes) -> _Past | None:
    """Collect the positions before a request's first from others with the same tokens, each from who was first.

    A block is found in the cache under the one who filled it first, and a fork shares its parent's.
    """
    if not len(rows) or int(rows.position[0]) == 0:
        return None
    missing = prefixes.up_to(int(rows.request[0]), int(rows.position[0]))
    missing_positions = torch.arange(len(missing))
    position, columns = list[torch.Tensor](), [list[torch.Tensor]() for _ in taps]
    for step in steps:
        if step.index > int(rows.step[0]) or not len(missing):
            break
        if any(step.rows_of(tap) is not None for tap in taps):
            continue
        offered = prefixes.of(step_rows(step, taps[0]))
        where = (offered == missing[:, None]).int().argmax(dim=1)
        is_found = offered[where] == missing
        if not bool(is_found.any()):
            continue
        position.append(missing_positions[is_found])
        for column, tap in zip(columns, taps, strict=True):
            column.append(step.tap(tap)[where[is_found]])
        missing, missing_positions = missing[~is_found], missing_positions[~is_found]
    return _Past(torch.cat(position), *(torch.cat(column) for column in columns)) if position else None


def _epochs(
    rows: Rows,
    context: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    inherited: _Past | None,
) -> Iterator[tuple[Rows, torch.Tensor, AttentionInputs]]:
    latest: dict[int, int] = {}
    key_position = rows.position
    if inherited is not None:  # behind the request's own rows, so that their indices stay
        latest = {int(position): len(rows) + at for at, position in enumerate(inherited.position)}
        key_position = torch.cat([key_position, inherited.position])
        key, value = torch.cat([key, inherited.key]), torch.cat([value, inherited.value])
    for begin, end in _spans(rows.position.tolist()):
        own = range(begin, end)
        first = min(rows.position[begin:end].tolist())
        earlier = [row for position, row in latest.items() if position < first]
        history = torch.tensor([*earlier, *own], dtype=torch.int64)
        chosen = slice(begin, end)
        if _complete(key_position[history]):
            yield (
                rows.select(torch.arange(begin, end)),
                context[chosen],
                AttentionInputs(
                    query=query[chosen],
                    key=key[history],
                    value=value[history],
                    query_position=rows.position[chosen],
                    key_position=key_position[history],
                ),
            )
        latest |= {int(rows.position[row]): row for row in own}


def _spans(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Split where a position comes again."""
    begin, seen = 0, set[int]()
    for at, position in enumerate(positions):
        if position in seen:
            yield begin, at
            begin, seen = at, set()
        seen.add(position)
    if positions:
        yield begin, len(positions)


def _complete(positions: torch.Tensor) -> bool:
    """Whether every position below the last is there: attention over a history with holes cannot be replayed."""
    return len(positions) == int(positions.max()) + 1
