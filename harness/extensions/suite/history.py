"""The runs of a suite over time: since when a case fails, when its numbers changed, what it costs."""

from collections.abc import Sequence
from pathlib import Path

from harness.errors import Code, HarnessError
from harness.extensions.suite.report.json import SUITE_NAME, load_suite
from harness.extensions.suite.result import CaseTrend, SuiteHistory, SuiteResult


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
    found = sorted(item.parent for item in path.glob(f"*/{SUITE_NAME}"))
    if not found:
        what = "the folder holds no run of a suite"
        raise HarnessError(Code.BAD_SUITE_RESULT, what, where=path, expected=f"folders with {SUITE_NAME}")
    return found
