"""The KV cache read back through the block table, bit for bit against what was written."""

from collections.abc import Iterator

import torch

from harness.compare.align import Locator, Rows, is_readback, step_rows
from harness.compare.local import LocalErrors
from harness.compare.prefixes import Prefixes
from harness.metrics import rounding_unit, row_metrics
from harness.recording import Step
from harness.taps import DecoderGraph, Kind, Operation


def cache_errors(locator: Locator, graph: DecoderGraph) -> Iterator[tuple[Operation, LocalErrors]]:
    """Compare every `k_cache` and `v_cache` row with the key or value last recorded before it for the same tokens.

    Any differing bit is an error: a cache stores, it does not compute. A cache of a narrower dtype shows as rounding.
    """
    writes = _Writes(locator)
    for operation in graph:
        if operation.kind is Kind.CACHE:
            errors = _read_back(operation, writes)
            if errors is not None:
                yield operation, errors


class _Writes:
    """Where the content of each prefix was last computed, as of each step that reads the cache back."""

    def __init__(self, locator: Locator) -> None:
        self.locator = locator
        self.prefixes = Prefixes(locator.recording.manifest.requests)
        self._found: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}

    def before(self, step: Step, rows: Rows, tap: str) -> torch.Tensor:
        """Return [rows, 2] int64: the step and the row within `tap` of each row's latest write; -1 for none."""
        signature = self.locator.signature(tap)
        if signature not in self._found:
            self._found[signature] = self._tables(tap)
        return self._found[signature][step.index][self.prefixes.of(rows)]

    def _tables(self, tap: str) -> dict[int, torch.Tensor]:
        """Return, per read-back step, a table of all prefixes."""
        latest, tables = torch.full((self.prefixes.count, 2), -1, dtype=torch.int64), {}
        unchanged: torch.Tensor | None = None
        for step in self.locator.recording.steps:
            if is_readback(step):
                tables[step.index] = unchanged = latest.clone() if unchanged is None else unchanged
            elif step.has(tap):
                rows = step_rows(step, tap)
                latest[self.prefixes.of(rows)] = torch.stack([rows.step, torch.arange(len(rows))], dim=1)
                unchanged = None
        return tables

    def is_kept(self, step: Step, rows: Rows, read: torch.Tensor, tap: str) -> torch.Tensor:
        """Return [rows] bool: any write before `step` of the same tokens holds the bits that were read."""
        wanted, kept = self.prefixes.of(rows), torch.zeros(len(rows), dtype=torch.bool)
        for writer in self.locator.recording.steps[: step.index]:
            if not is_readback(writer) and writer.has(tap):
                written = self.prefixes.of(step_rows(writer, tap))
                here, there = (wanted[:, None] == written).nonzero().unbind(1)
                kept[here[~_differs(read[here], writer.tap(tap)[there].flatten(1))]] = True
        return kept


def _read_back(operation: Operation, writes: _Writes) -> LocalErrors | None:
    rows, roundings, differing = list[Rows](), list[torch.Tensor](), list[torch.Tensor]()
    source, locator = operation.inputs[0], writes.locator
    for step in locator.recording.steps:
        if not is_readback(step) or not step.has(operation.tap):
            continue
        own, read = step_rows(step, operation.tap), step.tap(operation.tap)
        found = writes.before(step, own, source)
        present = found[:, 0] >= 0
        if not bool(present.any()):
            continue
        own = own.select(present)
        written, read = locator.gather(source, found[present]).flatten(1), read[present].flatten(1)
        bad = _differs(read, written)
        if bool(bad.any()):  # of several who computed the same tokens, the cache may keep any
            bad[bad.clone()] = ~writes.is_kept(step, own.select(bad), read[bad], source)
        rows.append(own)
        errors = row_metrics(read, written).relative_l2 / rounding_unit(read.dtype)
        roundings.append(torch.where(bad, errors, 0.0))
        differing.append(bad)
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
    read_bytes, written_bytes = (x.contiguous().view(torch.uint8) for x in (read, written))
    return (read_bytes != written_bytes).any(dim=1)
