"""Compare two runs of the same requests bit for bit: which operations gave other outputs for the same inputs.

A bit that changes in one operation changes all that follows. So an operation is compared only in rows whose inputs are
the same in both runs. For an operation that looks back, the inputs of all earlier rows have to be the same, too.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from harness.base.metrics import rounding_unit, row_errors
from harness.formats.recording import Recording
from harness.formats.taps import KINDS, Graph, Kind, Operation
from harness.judge.compare.batch import PaddedBatch
from harness.judge.compare.sequences import RowSequence, sequences
from harness.judge.compare.shapes import engine_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRows:
    """Rows of one operation that had the same inputs in both runs; tensors [rows]."""

    operation: Operation
    request: int
    """Id in the second run."""
    position: torch.Tensor
    """int64."""
    is_changed: torch.Tensor
    """bool: a bit differs."""
    roundings: torch.Tensor
    """float64: the difference relative to the row's norm in the first run, in roundings of the engine's dtype."""


def compare_bits(before: Recording, after: Recording, graph: Graph) -> Iterator[ComparedRows]:
    """Yield the rows of every operation that can be compared, request by request in the order of the run.

    Args:
        before: one run, its taps named as in the graph.
        after: another. Requests are the same if their tokens are; others are left out.
        graph: of the model.
    """
    known = {tuple(item.request.token_ids): item for item in sequences(before)}
    unit = rounding_unit(engine_dtype(before))
    for sequence in sequences(after):
        earlier = known.get(tuple(sequence.request.token_ids))
        if earlier is not None:
            yield from _compare_sequence(
                PaddedBatch(before, [earlier]), PaddedBatch(after, [sequence]), sequence, graph, unit
            )


def _compare_sequence(
    before: PaddedBatch, after: PaddedBatch, sequence: RowSequence, graph: Graph, unit: float
) -> Iterator[ComparedRows]:
    same: dict[str, torch.Tensor] = {}
    """[tokens] bool of each tap: recorded in both runs, with the same bits."""
    for operation in graph:
        if operation.is_kept:
            continue
        rows = _rows_of_both(before, after, operation.tap)
        if rows is None:
            continue
        position, left, right = rows
        is_changed = rows_differ(left, right)
        same[operation.tap] = torch.zeros(len(sequence), dtype=torch.bool)
        same[operation.tap][position] = ~is_changed
        wanted = (sequence.is_own & _inputs_are_same(operation, same, len(sequence)))[position]
        if bool(wanted.any()):
            yield ComparedRows(
                operation=operation,
                request=sequence.request.id,
                position=position[wanted],
                is_changed=is_changed[wanted],
                roundings=_roundings(left[wanted], right[wanted], unit),
            )


def _rows_of_both(
    before: PaddedBatch, after: PaddedBatch, tap: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the positions that both recorded, and the rows of each."""
    left, right = before.recorded(tap), after.recorded(tap)
    if left is None or right is None or left.rows.dtype != right.rows.dtype:
        return None
    position, at, where = _intersection(left.places, right.places)
    return (position, left.rows[at].flatten(1), right.rows[where].flatten(1)) if len(position) else None


def _intersection(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the numbers that are in both, and where they stand in each."""
    where = {value: at for at, value in enumerate(right.tolist())}
    pairs = [(value, at, where[value]) for at, value in enumerate(left.tolist()) if value in where]
    values, ours, theirs = torch.tensor(pairs, dtype=torch.int64).view(-1, 3).unbind(dim=1)
    return values, ours, theirs


def _inputs_are_same(operation: Operation, same: Mapping[str, torch.Tensor], num_tokens: int) -> torch.Tensor:
    """[tokens] bool: rows whose inputs are the same, and those of all earlier rows if the operation may look back."""
    is_same = torch.ones(num_tokens, dtype=torch.bool)
    for tap in operation.inputs:
        is_same &= same.get(tap, torch.zeros_like(is_same))
    looks_back = operation.kind is Kind.ATTENTION or KINDS[operation.kind].error_model is None
    return is_same.int().cummin(dim=0).values.bool() if looks_back else is_same


def rows_differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return [rows] bool: a bit differs; both are [rows, W] of one dtype."""
    ours, theirs = (x.contiguous().view(torch.uint8) for x in (left, right))
    return (ours != theirs).any(dim=1)


def _roundings(left: torch.Tensor, right: torch.Tensor, unit: float) -> torch.Tensor:
    if not left.is_floating_point():
        return torch.zeros(len(left), dtype=torch.float64)
    return row_errors(right, left) / unit


def first_changed(compared: Iterable[ComparedRows], graph: Graph) -> ComparedRows | None:
    """Return the first row that changed, alone: the first operation of the run at the lowest position."""
    order = {operation.tap: at for at, operation in enumerate(graph)}
    best: tuple[int, int] | None = None
    first: ComparedRows | None = None
    for rows in compared:
        places = rows.is_changed.nonzero()[:, 0]
        if not len(places):
            continue
        at = int(places[rows.position[places].argmin()])
        key = int(rows.position[at]), order[rows.operation.tap]
        if best is None or key < best:
            best = key
            first = ComparedRows(
                operation=rows.operation,
                request=rows.request,
                position=rows.position[at : at + 1],
                is_changed=rows.is_changed[at : at + 1],
                roundings=rows.roundings[at : at + 1],
            )
    return first
