"""The KV cache read back through the block table, bit for bit against what was written."""

from collections.abc import Iterator, Sequence

import torch

from harness.compare.align import Locator, Rows, is_readback, step_rows
from harness.compare.local import LocalErrors
from harness.metrics import rounding_unit, row_metrics
from harness.recording import Step
from harness.taps import DecoderGraph, Kind, Operation


def cache_errors(locator: Locator, graph: DecoderGraph) -> Iterator[tuple[Operation, LocalErrors]]:
    """Compare every `k_cache` and `v_cache` row with the key or value recorded for the same (request, position).

    Any differing bit is an error: a cache stores, it does not compute. A cache of a narrower dtype shows as rounding.
    """
    read_back = [step for step in locator.recording.steps if is_readback(step)]
    for operation in graph:
        if operation.kind is Kind.CACHE:
            errors = _read_back([step for step in read_back if step.has(operation.tap)], operation, locator)
            if errors is not None:
                yield operation, errors


def _read_back(steps: Sequence[Step], operation: Operation, locator: Locator) -> LocalErrors | None:
    rows, roundings, differing = list[Rows](), list[torch.Tensor](), list[torch.Tensor]()
    for step in steps:
        own, read = step_rows(step, operation.tap), step.tap(operation.tap)
        found = locator.find(operation.inputs[0], own)
        present = found[:, 0] >= 0
        if not bool(present.any()):
            continue
        written = locator.gather(operation.inputs[0], found[present]).flatten(1)
        read = read[present].flatten(1)
        rows.append(own.select(present))
        roundings.append(row_metrics(read, written).relative_l2 / rounding_unit(read.dtype))
        differing.append(_differs(read, written))
    if not rows:
        return None
    errors, bad = torch.cat(roundings), torch.cat(differing)
    return LocalErrors(
        rows=Rows.concat(rows),
        roundings=torch.where(bad & ~(errors > 0), torch.inf, errors),
        bound=torch.zeros_like(errors),
        bad=bad,
        exact=not bool(bad.any()),
    )


def _differs(read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """[rows] bool: any bit differs. Two NaN of the same bits are equal: the cache is not to blame for them."""
    if read.dtype != written.dtype:
        return (read.to(torch.float64) != written.to(torch.float64)).any(dim=1)
    num_rows = len(read)
    read_bytes, written_bytes = (x.contiguous().view(torch.uint8).reshape(num_rows, -1) for x in (read, written))
    return (read_bytes != written_bytes).any(dim=1)
