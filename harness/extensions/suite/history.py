"""Runs of a suite side by side: what changed between two, and since when cases fail over many.

The noise is measured on the two suites themselves. Between two runs most cases do not change, so the ratio of a figure,
new by old, scatters over the cases as the machine and the rounding make it scatter. A case has moved if its ratio lies
beyond what the others show: further from their median than `DEVIATIONS` robust standard deviations (1.4826 times the
median absolute deviation), and further than the smallest change that is worth a look. With few cases the scatter is not
known, and the smallest change is larger.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.extensions.suite.report import SUITE_NAME, load_suite
from harness.extensions.suite.result import (
    CaseResult,
    CaseTrend,
    CaseVerdict,
    Moved,
    SuiteDiff,
    SuiteHistory,
    SuiteResult,
)

DEVIATIONS = 5.0
FEW_CASES = 8
"""Below it the scatter of the cases is no measurement."""
_SMALLEST, _SMALLEST_OF_FEW = math.log(1.2), math.log(2.0)
_SECONDS = "seconds"
_FLOORS = {"kl_max": 1e-9, "bound_share_max": 1e-3, "propagated_ratio_max": 1e-2, _SECONDS: 1e-2}
"""Values below which a figure is zero for all that matters."""


def diff_suites(old: SuiteResult, new: SuiteResult) -> SuiteDiff:
    """Compare two runs of a suite, case by case, by name."""
    before, after = ({case.name: case for case in suite.cases} for suite in (old, new))
    pairs = [(before[name], after[name]) for name in after if name in before]
    changed = [pair for pair in pairs if _way(pair[0]) != _way(pair[1])]
    moved = [figure_change for figure in _figures(pairs) for figure_change in _moved(pairs, figure, _figure_of(figure))]
    slower = [
        figure_change
        for figure_change in _moved(pairs, _SECONDS, _seconds)
        if figure_change.new > figure_change.old * figure_change.usual_ratio
    ]
    return SuiteDiff(
        new_failures=tuple(pair for pair in changed if _passed(pair[0])),
        new_passes=tuple(pair for pair in changed if _passed(pair[1])),
        changed_failures=tuple(pair for pair in changed if not _passed(pair[0]) and not _passed(pair[1])),
        moved=tuple(moved),
        slower=tuple(slower),
        added=tuple(after[name] for name in after if name not in before),
        removed=tuple(before[name] for name in before if name not in after),
        num_same=len(pairs) - len(changed),
    )


def _passed(case: CaseResult) -> bool:
    return case.verdict is CaseVerdict.PASS


def _way(case: CaseResult) -> tuple[object, ...]:
    """Return how a case ended, as far as it matters: numbers inside of a reason do not."""
    place = case.first_divergence or {}
    return case.verdict, case.code, *(place.get(name) for name in ("tap", "schedule", "request", "position"))


def _figures(pairs: Sequence[tuple[CaseResult, CaseResult]]) -> list[str]:
    return sorted({name for old, new in pairs for name in old.figures.keys() & new.figures.keys()})


def _figure_of(figure: str) -> Callable[[CaseResult], float | None]:
    return lambda case: case.figures.get(figure)


def _seconds(case: CaseResult) -> float | None:
    return case.seconds if case.verdict in (CaseVerdict.PASS, CaseVerdict.MISMATCH) else None


def _moved(
    pairs: Sequence[tuple[CaseResult, CaseResult]], figure: str, value: Callable[[CaseResult], float | None]
) -> Iterator[Moved]:
    """Yield the cases whose figure moved beyond what the figures of the others do."""
    logs = _log_ratios(pairs, figure, value)
    if not logs:
        return
    usual = statistics.median(logs.values()) if len(logs) >= FEW_CASES else 0.0
    deviation = 1.4826 * statistics.median(abs(log - usual) for log in logs.values())
    limit = max(_SMALLEST, DEVIATIONS * deviation) if len(logs) >= FEW_CASES else _SMALLEST_OF_FEW
    for old, new in pairs:
        log = logs.get(new.name)
        if log is not None and abs(log - usual) > limit:
            was, is_now = value(old), value(new)
            assert was is not None
            assert is_now is not None
            yield Moved(
                name=new.name,
                figure=figure,
                old=was,
                new=is_now,
                usual_ratio=math.exp(usual),
                largest_usual_ratio=math.exp(usual + limit),
            )


def _log_ratios(
    pairs: Sequence[tuple[CaseResult, CaseResult]], figure: str, value: Callable[[CaseResult], float | None]
) -> Mapping[str, float]:
    """Return log(new / old) by name of the case; values below the figure's floor are the floor."""
    floor, logs = _FLOORS.get(figure, 1e-6), {}
    for old, new in pairs:
        was, is_now = value(old), value(new)
        if was is not None and is_now is not None:
            logs[new.name] = math.log(max(is_now, floor) / max(was, floor))
    return logs


def read_history(paths: Sequence[Path]) -> SuiteHistory:
    """Read the runs of a suite.

    Each path is a `suite.json`, the folder of one, or a folder of such folders. Runs are taken in the order in which
    they began, if all say when; else as they are given, folders in a folder by name.

    Raises:
        HarnessError: BAD_SUITE_RESULT.
    """
    return history_of([load_suite(run) for path in paths for run in _runs(path)])


def history_of(runs: Sequence[SuiteResult]) -> SuiteHistory:
    """Put the cases of some runs beside each other, by name."""
    if all(run.begun_at for run in runs):
        runs = sorted(runs, key=lambda run: run.begun_at or "")
    by_name = [{case.name: case for case in run.cases} for run in runs]
    names = dict.fromkeys(name for cases in by_name for name in cases)
    trends = [CaseTrend(name=name, results=tuple(cases.get(name) for cases in by_name)) for name in sorted(names)]
    return SuiteHistory(runs=tuple(runs), trends=tuple(trends))


def _runs(path: Path) -> list[Path]:
    if not path.is_dir() or (path / SUITE_NAME).exists():
        return [path]
    folders = sorted(item.parent for item in path.glob(f"*/{SUITE_NAME}"))
    if not folders:
        what = "the folder holds no run of a suite"
        raise HarnessError(Code.BAD_SUITE_RESULT, what, where=path, expected=f"folders with {SUITE_NAME}")
    return folders
