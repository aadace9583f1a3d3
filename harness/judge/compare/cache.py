"""Compare the KV cache, read back through the block table, bit for bit with what was written."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from harness.base.metrics import RowMetrics, rounding_unit, row_metrics
from harness.formats.recording import Step
from harness.formats.taps import Graph, Kind, Operation, prefix_of
from harness.judge.compare.align import Locator, Prefixes, Rows, is_readback, step_rows
from harness.judge.compare.bits import rows_differ
from harness.judge.compare.cache_format import CacheFormat
from harness.judge.compare.propagated import RATIO_BOUND
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.shapes import cache_format, engine_dtype
from harness.oracle.sketch_rows import estimated_metrics

KEPT_AS_DECLARED = "kept in {}, as declared"
_KEYS = "k_cache"


def cache_errors(
    locator: Locator,
    graph: Graph,
    usable: Collection[str],
    expected: Locator | None = None,
    noise: Mapping[str, torch.Tensor] | None = None,
    *,
    sketched: Collection[str] = (),
) -> Iterator[tuple[Operation, LocalErrors]]:
    """Compare every `k_cache` and `v_cache` row with the key or value last recorded before it for the same tokens.

    Any differing bit is an error: a cache stores, it does not compute. Rows that were computed in a wider dtype are
    stored in the engine's dtype, or in the dtype that is declared for the cache; a narrower cache shows as rounding.

    Where no row of these tokens was recorded (a prefix was taken over, or the engine shows its cache and not what it
    writes), the row is wrong unless it is as near to the golden's as HF's own noise allows. The distance is estimated
    for taps that are `sketched` in `expected`.
    """
    writes = _Writes(locator)
    for operation in graph:
        if operation.kind is Kind.CACHE and operation.tap in usable:
            parts = [*_read_back(operation, writes)] if operation.inputs[0] in usable else []
            if expected is not None:
                metrics = estimated_metrics if operation.inputs[0] in sketched else row_metrics
                rounding = _Noise.of(locator, graph, operation, noise or {})
                parts += _compared_with_golden(operation, writes, expected, rounding, metrics)
            if parts:
                yield operation, _joined(parts, writes.declared(operation))


def reads_unwritten(locator: Locator, graph: Graph, usable: Collection[str]) -> bool:
    """Whether a cache holds rows whose writing was not recorded: only a golden has what they should be."""
    writes = _Writes(locator)
    return any(
        bool((writes.before(step, step_rows(step, operation.tap), operation.inputs[0])[:, 0] < 0).any())
        for operation in graph
        if operation.kind is Kind.CACHE and operation.tap in usable
        for step in _readbacks(operation, writes)
    )


class _Writes:
    """The latest computation of each prefix's content, as of each step that reads the cache back."""

    def __init__(self, locator: Locator) -> None:
        self.locator = locator
        self.prefixes = Prefixes(locator.recording.manifest.requests)
        self._formats: dict[str, CacheFormat | None] = {}
        self._writes: dict[tuple[str, ...], dict[int, torch.Tensor]] = {}

    def declared(self, operation: Operation) -> CacheFormat | None:
        """Return the declared format of the keys or the values."""
        if operation.tap not in self._formats:
            part: Literal["k", "v"] = "k" if operation.site == _KEYS else "v"
            self._formats[operation.tap] = cache_format(self.locator.recording, part, prefix_of(operation.tap))
        return self._formats[operation.tap]

    def differs(self, read: torch.Tensor, written: torch.Tensor, operation: Operation) -> torch.Tensor:
        """[rows] bool: what was read differs from what a cache of this engine stores of what was written."""
        declared = self.declared(operation)
        if declared is not None and declared.dtype is None:
            return declared.differs(read, written)
        return _differs(read, self.stored(read, written, operation))

    def stored(self, read: torch.Tensor, written: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Return what was written as a cache of this engine holds it.

        That is the declared format, or the engine's dtype. A cache whose content is in neither keeps its input
        unchanged.
        """
        declared = self.declared(operation)
        if declared is not None and declared.dtype is None:
            return declared.unturned(declared.stored(written).values).to(read.dtype)
        dtype = engine_dtype(self.locator.recording) if declared is None else declared.dtype or read.dtype
        is_wider = declared is None and read.dtype != dtype
        if is_wider and bool(_differs(read, read.to(dtype).to(read.dtype)).any()):
            return written
        return written.to(dtype) if written.dtype.itemsize > dtype.itemsize else written

    def before(self, step: Step, rows: Rows, tap: str) -> torch.Tensor:
        """Return [rows, 2] int64: the step and the row within `tap` of each row's latest write; -1 for none."""
        signature = self.locator.signature(tap)
        if signature not in self._writes:
            self._writes[signature] = self._tables(tap)
        return self._writes[signature][step.index][self.prefixes.of(rows)]

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

    def is_kept(self, step: Step, rows: Rows, read: torch.Tensor, operation: Operation) -> torch.Tensor:
        """Return [rows] bool: a write of the same tokens before `step` holds the bits that were read."""
        tap = operation.inputs[0]
        wanted, kept = self.prefixes.of(rows), torch.zeros(len(rows), dtype=torch.bool)
        for writer in self.locator.recording.steps[: step.index]:
            if not is_readback(writer) and writer.has(tap):
                written = self.prefixes.of(step_rows(writer, tap))
                here, there = (wanted[:, None] == written).nonzero().unbind(1)
                content = writer.tap(tap)[there].flatten(1)
                kept[here[~self.differs(read[here], content, operation)]] = True
        return kept


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of one step."""

    errors: LocalErrors
    clipped: torch.Tensor | None = None
    """[K] numbers of these rows beyond the largest of the declared format; None of a format without scales."""
    num_numbers: int = 0
    """Numbers that were counted."""


def _read_back(operation: Operation, writes: _Writes) -> Iterator[_Part]:
    """Compare the rows whose writing was recorded with what was written."""
    source = operation.inputs[0]
    for step, rows, read in _read(operation, writes):
        latest = writes.before(step, rows, source)
        present = latest[:, 0] >= 0
        if not bool(present.any()):
            continue
        rows, read = rows.select(present), read[present]
        written = writes.locator.gather(source, latest[present]).flatten(1)
        bad = writes.differs(read, written, operation)
        if bool(bad.any()):  # of several rows with the same tokens, the cache may keep any
            bad[bad.clone()] = ~writes.is_kept(step, rows.select(bad), read[bad], operation)
        distance = row_metrics(read, writes.stored(read, written, operation)).relative_l2 / rounding_unit(read.dtype)
        roundings = torch.where(bad, torch.where(distance > 0, distance, torch.inf), 0.0)
        declared = writes.declared(operation)
        clipped = declared.num_clipped(written) if declared is not None and declared.has_scale else None
        errors = LocalErrors(rows=rows, roundings=roundings, bound=torch.zeros_like(roundings))
        yield _Part(errors, clipped, written.numel())


@dataclass(frozen=True, slots=True)
class _Noise:
    """Relative L2 error that rounding makes of what a cache holds."""

    rows: torch.Tensor | None
    """HF's own, per row of the golden."""
    least: float

    @classmethod
    def of(cls, locator: Locator, graph: Graph, operation: Operation, noise: Mapping[str, torch.Tensor]) -> "_Noise":
        rows = noise.get(operation.inputs[0])
        if rows is not None and len(rows):
            return cls(rows, float(rows.nanmedian()))
        depth = next(at for at, item in enumerate(graph, start=1) if item.tap == operation.tap)
        return cls(None, rounding_unit(engine_dtype(locator.recording)) * math.sqrt(depth))

    def at(self, running: torch.Tensor) -> torch.Tensor:
        """Return the noise of some rows of the golden, by their running numbers."""
        if self.rows is None:
            return torch.full((len(running),), self.least, dtype=torch.float64)
        return self.rows[running].to(torch.float64).clamp(min=self.least)


def _compared_with_golden(
    operation: Operation,
    writes: _Writes,
    expected: Locator,
    noise: _Noise,
    metrics_of: Callable[[torch.Tensor, torch.Tensor], RowMetrics],
) -> Iterator[_Part]:
    """Compare the rows whose writing was not recorded with the golden's."""
    source = operation.inputs[0]
    for step, rows, read in _read(operation, writes):
        theirs = expected.find(source, rows)
        wanted = (writes.before(step, rows, source)[:, 0] < 0) & (theirs[:, 0] >= 0)
        if not bool(wanted.any()):
            continue
        metrics = metrics_of(read[wanted], expected.gather(source, theirs[wanted]).flatten(1))
        unit = rounding_unit(read.dtype)
        roundings = torch.where(metrics.is_finite, metrics.relative_l2 / unit, torch.inf)
        bound = RATIO_BOUND * noise.at(theirs[wanted][:, 2]) / unit
        yield _Part(LocalErrors(rows=rows.select(wanted), roundings=roundings, bound=bound))


def _read(operation: Operation, writes: _Writes) -> Iterator[tuple[Step, Rows, torch.Tensor]]:
    """Yield each step that reads this cache back, with its rows and what was read, flat."""
    for step in _readbacks(operation, writes):
        yield step, step_rows(step, operation.tap), step.tap(operation.tap).flatten(1)


def _readbacks(operation: Operation, writes: _Writes) -> Iterator[Step]:
    """Yield each step that reads this cache back."""
    return (step for step in writes.locator.recording.steps if is_readback(step) and step.has(operation.tap))


def _joined(parts: Sequence[_Part], declared: CacheFormat | None) -> LocalErrors:
    convention = None if declared is None else KEPT_AS_DECLARED.format(declared.title) + _clips(parts)
    return replace(LocalErrors.concat([part.errors for part in parts]), convention=convention)


def _clips(parts: Sequence[_Part]) -> str:
    """Return a note of the numbers that are clipped, by KV head; empty where none is."""
    counts = [part.clipped for part in parts if part.clipped is not None]
    by_head = torch.stack(counts).sum(dim=0).tolist() if counts else []
    if not sum(by_head):
        return ""
    heads = ", ".join(f"{count:,} in KV head {head}" for head, count in enumerate(by_head) if count)
    return f"; {sum(by_head):,} of {sum(part.num_numbers for part in parts):,} numbers are clipped: {heads}"


def _differs(read: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
    """[rows] bool: a bit differs. Two NaN of the same bits are equal: the cache did not make them."""
    if read.dtype != written.dtype:
        return (read.to(torch.float64) != written.to(torch.float64)).any(dim=1)
    return rows_differ(read, written)
