"""The table behind the power of a pass: the known mistakes that a check would have shown, and what the others need."""

from tabulate import tabulate

from harness.errors import printable
from harness.report.check.dtypes import DtypeChecks
from harness.report.check.sentences import power_sentence
from harness.report.check.table import number
from harness.results.check import CheckResult


def power_text(checks: DtypeChecks, *, tablefmt: str = "simple") -> str:
    """Return the known mistakes of each check: first those that it would not have shown."""
    return "\n".join(_table(result, tablefmt) for result in checks.results)


def _table(result: CheckResult, tablefmt: str) -> str:
    head = f"{result.outcome.upper()} {printable(result.engine)} in {printable(result.dtype)}"
    if result.power is None:
        return f"{head}: the power of a check is measured where it passes\n"
    mistakes = sorted(result.power.mistakes, key=lambda mistake: (mistake.is_seen, mistake.needs or ""))
    rows = [
        [printable(item.tap), printable(item.mistake), number(item.bound_share), item.needs or "seen"]
        for item in mistakes
    ]
    headers = ["operation", "mistake", "share of bound", "needs"]
    table = tabulate(rows, headers, tablefmt, disable_numparse=True, colalign=("left", "left", "right", "left"))
    return f"{head}: {power_sentence(result.power)}\n\n{table}\n"
