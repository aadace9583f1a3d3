"""The taps in a step of many requests of one token each.

At position 0 rotary turns nothing and attention is its only value, so that what is wrong in rotary, mask or cache does
not hide the map. HF computes the same tokens, and goes on with the engine's tensor wherever one was found: each value
is looked for as it follows from the engine's own values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from harness.engines.by_content.columns import ColumnIndex, Columns, Fit, relative_error
from harness.engines.by_content.hf_run import EndOfRun, run_hf
from harness.engines.by_content.sites import RETURNED
from harness.engines.by_content.steps import Table, sites_elsewhere
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.model import HFModel

_MOST_CANDIDATES = 24
_MOST_TRIALS = 200
_WINDOW = 8
"""Taps after the one on trial that are looked at."""


class FirstStep:
    """Finds the taps in a step of many requests of one token."""

    def __init__(self, hf: HFModel, ids: Sequence[int], tables: Sequence[Table], rounding: float) -> None:
        self._hf, self._ids = hf, torch.tensor(ids)[:, None]
        self.tables = tables
        self._index = ColumnIndex([table.rows for table in tables], rounding=rounding)
        self.fits: dict[str, list[Fit]] = {}
        self.by_consumers: set[str] = set()
        self._before_attention = before_attention(hf.graph)
        self._unmatched: list[Operation] = []
        self._num_trials = 0

    def find(self) -> None:
        """Find what follows from the engine's values; then what other values only follow from."""
        run_hf(self._hf, self._ids, self._look)
        tried = set[str]()
        while operation := next((op for op in self._unmatched if op.tap not in tried and self._is_missed(op)), None):
            tried.add(operation.tap)
            if self._try(operation):
                self._unmatched = []
                run_hf(self._hf, self._ids, self._look)

    def value(self, tap: str) -> torch.Tensor:
        """Return the engine's value of a tap that was found, [T, W]."""
        fit = self.fits[tap][0]
        return fit.columns.of(self.tables[fit.index].rows)

    def _look(self, operation: Operation, value: torch.Tensor) -> torch.Tensor | None:
        if operation.kind is Kind.CHOICE:
            return None
        if operation.tap not in self.fits:
            fits = [fit for fit in self._index.find(value) if self._may_have(operation, fit.columns)]
            if not fits:
                self._unmatched.append(operation)
                return None
            self.fits[operation.tap] = fits
        return self.value(operation.tap)

    def _may_have(self, operation: Operation, columns: Columns) -> bool:
        """Whether columns may lie so: heads of queries and keys in any order, since products of both do not show it."""
        return columns.is_rising or operation.tap in self._before_attention

    def _is_missed(self, operation: Operation) -> bool:
        """Whether what is computed from a value was not found either: the engine has another value there."""
        return any(operation.tap in op.inputs and not self._is_exact(op) for op in self._hf.graph)

    def _is_exact(self, operation: Operation) -> bool:
        """Whether a tap was found as HF computes it, to rounding."""
        fits = self.fits.get(operation.tap, ())
        return operation.kind in (Kind.CHOICE, Kind.CACHE) or any(fit.error <= self._index.fine for fit in fits)

    def _try(self, operation: Operation) -> bool:
        """Take the tensor for a tap from which HF computes what the engine computes next."""
        most, best = 0, None
        for fit in self._candidates(operation):
            if self._num_trials >= _MOST_TRIALS:
                break
            self._num_trials += 1
            found = self._num_found_after(operation, fit)
            if found > most:
                most, best = found, fit
        if best is not None:
            self.fits = {
                op.tap: self.fits[op.tap] for op in self._hf.graph if op.tap in self.fits and self._is_exact(op)
            }
            self.fits[operation.tap] = self._index.find(best.columns.of(self.tables[best.index].rows)) or [best]
            self.by_consumers.add(operation.tap)
        return best is not None

    def _num_found_after(self, operation: Operation, fit: Fit) -> int:
        """Return how many of the next values are found if HF goes on with a tensor."""
        after = [op.tap for op in self._hf.graph]
        after = [tap for tap in after[after.index(operation.tap) + 1 :] if not self._is_exact(self._hf.graph[tap])]
        left, found, rows = set(after[:_WINDOW]), 0, fit.columns.of(self.tables[fit.index].rows)

        def look(op: Operation, value: torch.Tensor) -> torch.Tensor | None:
            nonlocal found
            if op.tap == operation.tap:
                return rows
            if op.tap not in left:
                return self.value(op.tap) if op.tap in self.fits else None
            left.discard(op.tap)
            fits = self._index.find(value)
            found += bool(fits) and fits[0].error <= self._index.fine and not self._is_within(fits, rows)
            if not left:
                raise EndOfRun
            return fits[0].columns.of(self.tables[fits[0].index].rows) if fits else None

        run_hf(self._hf, self._ids, look)
        return found

    def _is_within(self, fits: Sequence[Fit], rows: torch.Tensor) -> bool:
        """Whether what was found is the tensor on trial itself, which shows nothing: rotary at position 0, for one."""
        found = fits[0].columns.of(self.tables[fits[0].index].rows)
        return found.shape == rows.shape and relative_error(found, rows) <= self._index.fine

    def _candidates(self, operation: Operation) -> list[Fit]:
        """Return tensors that may be a tap: those of the same site in other layers first, then the next of the run."""
        width = prod(operation.shape)
        like = [_elsewhere(fit, self.tables, operation) for fit in self._fits_of_site(operation.site)]
        whole = [
            Fit(index=at, columns=Columns(start=0, stop=width), error=float("inf"))
            for at in range(self._begin(operation), len(self.tables))
            if self.tables[at].rows.shape[1] == width and self.tables[at].site.what != RETURNED
        ]
        distinct: list[Fit] = []
        for fit in [fit for fit in like if fit is not None] + whole[: 2 * _MOST_CANDIDATES]:
            rows = fit.columns.of(self.tables[fit.index].rows)
            if not any(torch.equal(rows, each.columns.of(self.tables[each.index].rows)) for each in distinct):
                distinct.append(fit)
        return distinct[:_MOST_CANDIDATES]

    def _fits_of_site(self, site: str) -> Iterator[tuple[int, Fit]]:
        for tap, fits in self.fits.items():
            layer = self._hf.graph[tap].layer
            if layer is not None and self._hf.graph[tap].site == site:
                yield from ((layer, fit) for fit in fits[:4])

    def _begin(self, operation: Operation) -> int:
        """Return the first tensor after those that the operation reads."""
        known = [self.fits[tap][0].index for tap in operation.inputs if tap in self.fits]
        return max(known, default=-1) + 1


def _elsewhere(found: tuple[int, Fit], tables: Sequence[Table], operation: Operation) -> Fit | None:
    """Return the tensor that is to the operation's layer what a tensor is to its own."""
    layer, fit = found
    assert operation.layer is not None
    wanted = sites_elsewhere(tables[fit.index].site, layer, operation.layer)
    at = next((at for site in wanted for at, table in enumerate(tables) if table.site == site), None)
    return None if at is None else replace(fit, index=at, error=float("inf"))


def before_attention(graph: Graph) -> set[str]:
    """Return the taps that only queries and keys follow from."""
    found = {tap for op in graph if op.kind is Kind.ATTENTION for tap in op.inputs[:2]}
    values = {op.inputs[2] for op in graph if op.kind is Kind.ATTENTION}
    readers: dict[str, set[str]] = {}
    for op in graph:
        for tap in op.inputs:
            readers.setdefault(tap, set()).add(op.tap)
    for op in reversed(graph.operations):
        own = {tap for tap in readers.get(op.tap, set()) if graph[tap].kind is not Kind.CACHE}
        if own and own <= found and op.tap not in values:
            found.add(op.tap)
    return found - values
