"""Judgements by hand: errors of an operation's rows, and their distances to a golden; a tap of a result."""

from collections.abc import Sequence

import torch

from harness.base.metrics import RowMetrics, row_metrics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.judged import TapJudgement
from harness.judge.compare.propagated import PropagatedErrors
from harness.judge.compare.row_judge import LocalErrors
from harness.results.check import RunResult, TapResult

from .in_memory import Row

ROWS: tuple[Row, ...] = ((7, 1), (2, 5), (2, 3), (9, 0))
"""The first of them by request and position is the third."""


def rows_of(rows: Sequence[Row], step: int = 0) -> Rows:
    request, position = (torch.tensor([row[at] for row in rows], dtype=torch.int64) for at in range(2))
    return Rows(request=request, position=position, step=torch.arange(len(rows)) + step)


def floats(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tap(result: RunResult, name: str) -> TapResult:
    (actual,) = [item for item in result.taps if item.name == name]
    return actual


def errors_of(
    roundings: Sequence[float], bound: Sequence[float] | float = 2.0, *, rows: Sequence[Row] = ROWS, **more
) -> LocalErrors:
    """Errors of rows; whatever is beyond its bound is bad."""
    size = floats(roundings)
    limit = floats([bound] * len(roundings) if isinstance(bound, float) else bound)
    return LocalErrors(rows=rows_of(rows), roundings=size, bound=limit, **more)


def metrics_of(actual: torch.Tensor, expected: torch.Tensor) -> RowMetrics:
    return row_metrics(actual, expected)


def propagated_of(
    ratio: Sequence[float], *, rows: Sequence[Row] = ROWS, metrics: RowMetrics | None = None, step: int = 0
) -> PropagatedErrors:
    """Distances whose ratios are given; metrics are those of equal rows, if not given."""
    same = torch.ones(len(ratio), 3, dtype=torch.float64)
    measured = metrics_of(same, same) if metrics is None else metrics
    return PropagatedErrors(rows=rows_of(rows, step), metrics=measured, ratio=floats(ratio))


def judgement(
    local: LocalErrors | None = None,
    cache: LocalErrors | None = None,
    propagated: PropagatedErrors | None = None,
    *,
    tap: str = "layers.3.mlp.act",
    kind: Kind = Kind.ACTIVATION,
    is_in_graph: bool = True,
) -> TapJudgement:
    is_cache = local is None and cache is not None and kind is not Kind.STATE
    operation = Operation(tap=tap, kind=Kind.CACHE if is_cache else kind)
    return TapJudgement(operation=operation, errors=local or cache, propagated=propagated, is_in_graph=is_in_graph)
