"""One recording of several ranks': the parts of a tap that each rank holds are put together."""

from collections.abc import Sequence
from math import prod

import torch

from harness.errors import Code, HarnessError
from harness.formats.recording.reader import Recording, Step
from harness.formats.recording.writer import RecordingWriter
from harness.formats.taps import Graph


def merge_ranks(ranks: Sequence[Recording], graph: Graph, writer: RecordingWriter) -> None:
    """Write the steps of all ranks as one: slices are put after one another, what every rank has is written once.

    Which it is, a tap's size says: that of the graph's, or a rank's share of it. The ranks' recordings have the same
    steps, and come in the order of the ranks.

    Raises:
        HarnessError: RANKS_DIFFER: in their steps, or in a tap that every rank has as a whole; ENGINE_FAILED: a tap has
            neither size.
    """
    counts = [len(rank.steps) for rank in ranks]
    if len(set(counts)) > 1:
        raise _differ("the ranks have computed other steps", "steps", counts[0], counts)
    for steps in zip(*(rank.steps for rank in ranks), strict=True):
        _merge_step(steps, graph, writer)


def _merge_step(steps: Sequence[Step], graph: Graph, writer: RecordingWriter) -> None:
    first, sampled = steps[0], steps[0].sampled
    for rank, step in enumerate(steps):
        if not (torch.equal(step.request, first.request) and torch.equal(step.position, first.position)):
            raise _differ("the ranks have computed other rows", f"step {first.index}, rank {rank}", None, None)
        if set(step.tap_names) != set(first.tap_names):
            where, others = f"step {first.index}, rank {rank}", set(step.tap_names) ^ set(first.tap_names)
            raise _differ("the ranks have recorded other taps", where, "those of rank 0", sorted(others)[0])
    sampled_rows = [] if sampled is None else (sampled >= 0).nonzero()[:, 0].tolist()
    partial_rows = {tap: rows for tap in first.tap_names if (rows := first.rows_of(tap)) is not None}
    writer.begin_step(
        phase=first.phase,
        request=first.request,
        position=first.position,
        sampled_rows=sampled_rows,
        slot_mapping=first.slot_mapping,
        block_tables=first.block_tables,
        partial_rows=partial_rows or None,
        ambiguous_rows=() if first.ambiguous is None else first.ambiguous,
    )
    for tap in first.tap_names:
        writer.tap(tap, _merged(tap, [step.tap(tap) for step in steps], graph, first.index))
    writer.end_step([] if sampled is None else sampled[sampled_rows].tolist())


def _merged(tap: str, parts: Sequence[torch.Tensor], graph: Graph, step: int) -> torch.Tensor:
    """Return a tap of all ranks: [rows, ...]."""
    where, known = f"{tap}, step {step}", graph.canonical(tap)
    size = prod(graph[known].shape) if known in graph else 0
    part_size = prod(parts[0].shape[1:])
    if part_size * len(parts) == size:
        return torch.cat(list(parts), dim=1)
    if size and part_size != size:
        what = "a rank's part of a tap is neither all of it nor its share"
        raise HarnessError(
            Code.ENGINE_FAILED, what, where=where, expected=f"{size} or {size // len(parts)} elements", actual=part_size
        )
    for rank, part in enumerate(parts):
        if not torch.equal(part.contiguous().view(torch.uint8), parts[0].contiguous().view(torch.uint8)):
            raise _differ(
                "a tap that every rank has as a whole differs between ranks", where, "rank 0's", f"rank {rank}'s"
            )
    return parts[0]


def _differ(what: str, where: str, expected: object, actual: object) -> HarnessError:
    hint = "look at the collective before it; --schedule batched runs one rank"
    return HarnessError(Code.RANKS_DIFFER, what, where=where, expected=expected, actual=actual, hint=hint)
