"""A suite as a matrix: models down, engines across, in each cell how its cases ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from harness.extensions.suite.result import SEVERITY, CaseResult, CaseVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixCell:
    """All cases of one model on one engine."""

    cases: tuple[CaseResult, ...]

    @property
    def verdict(self) -> CaseVerdict | None:
        """The worst; None if there is no case."""
        return max((case.verdict for case in self.cases), key=SEVERITY.index, default=None)

    @property
    def failed(self) -> tuple[CaseResult, ...]:
        """Those that did not pass, the worst first."""
        failed = [case for case in self.cases if case.verdict is not CaseVerdict.PASS]
        return tuple(sorted(failed, key=lambda case: -SEVERITY.index(case.verdict)))

    @property
    def counts(self) -> str:
        """The count of each ending: `3 pass, 1 mismatch`."""
        found = [(verdict, sum(case.verdict is verdict for case in self.cases)) for verdict in SEVERITY]
        return ", ".join(f"{number} {verdict}" for verdict, number in found if number)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictMatrix:
    """Cells by model and engine."""

    models: tuple[str, ...]
    engines: tuple[str, ...]
    cells: tuple[tuple[MatrixCell, ...], ...]
    """[models][engines]"""


def matrix_of(cases: Sequence[CaseResult]) -> VerdictMatrix:
    """Put cases into their cells; models and engines stand in the order of the plan."""
    by_place: dict[tuple[str, str], list[CaseResult]] = {}
    for case in cases:
        by_place.setdefault((case.labels["model"], case.labels["engine"]), []).append(case)
    models = tuple(dict.fromkeys(model for model, _ in by_place))
    engines = tuple(dict.fromkeys(engine for _, engine in by_place))
    cells = [[MatrixCell(cases=tuple(by_place.get((model, engine), ()))) for engine in engines] for model in models]
    return VerdictMatrix(models=models, engines=engines, cells=tuple(map(tuple, cells)))


def matrix_lines(
    cases: Sequence[CaseResult], *, tablefmt: str, name: Callable[[str], str], cell: Callable[[MatrixCell], str]
) -> list[str]:
    """Return the table of a matrix; `name` and `cell` say how a name and a cell are written."""
    matrix = matrix_of(cases)
    rows = [[name(model), *map(cell, cells)] for model, cells in zip(matrix.models, matrix.cells, strict=True)]
    headers = ["model", *map(name, matrix.engines)]
    return tabulate(rows, headers, tablefmt=tablefmt, disable_numparse=True).splitlines()
