"""Changes between two runs of a suite, and a suite over time, for people and for programs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tabulate import tabulate

from harness.errors import printable
from harness.extensions.suite.result import CaseResult, CaseTrend, CaseVerdict, Moved, SuiteDiff, SuiteHistory
from harness.report.check.table import count, number
from harness.report.document import SCHEMA_VERSION, plain
from harness.report.terminal import blocks_text, fitted_table


def diff_json(diff: SuiteDiff) -> dict[str, Any]:
    """Return a difference as plain dicts, lists, strings and finite numbers."""
    return {"schema_version": SCHEMA_VERSION, **plain(diff)} | {
        field: [{"old": plain(old), "new": plain(new)} for old, new in getattr(diff, field)]
        for field in ("new_failures", "new_passes", "changed_failures")
    }


def diff_text(diff: SuiteDiff) -> str:
    """Return a difference as lines: what is worse first."""
    blocks = [
        _block("new failures", diff.new_failures, _pair),
        _block("added cases that fail", diff.added_failures, _single),
        _block("fail in another way", diff.changed_failures, _pair),
        _block("slower", diff.slower, _moved),
        _block("figures that moved", diff.moved, _moved),
        _block("new passes", diff.new_passes, _pair),
        _block("cases that are no longer there", diff.removed, _single),
    ]
    counts = [f"{count(diff.num_same, 'case')} ended as before"]
    counts += [f"{count(len(diff.added), 'case')} added"] if diff.added else []
    return blocks_text([*blocks, [", ".join(counts)]])


def _block(title: str, items: Sequence[Any], lines_of: Callable[[Any], Iterator[str]]) -> list[str]:
    return [f"{title} ({len(items)})", *(line for item in items for line in lines_of(item))] if items else []


def _pair(pair: tuple[CaseResult, CaseResult]) -> Iterator[str]:
    old, new = pair
    yield f"  {printable(new.name)}"
    yield f"    {_way(old)} -> {_way(new)}"


def _single(case: CaseResult) -> Iterator[str]:
    yield f"  {printable(case.name)}: {_way(case)}"


def _way(case: CaseResult) -> str:
    detail = case.divergence_text.splitlines()
    return printable(f"{case.verdict} ({case.code}: {detail[0] if detail else ''})" if case.code else case.verdict)


def _moved(moved: Moved) -> Iterator[str]:
    yield f"  {printable(moved.name)}"
    usual = f"usual ratio {number(moved.usual_ratio)}, noise up to {number(moved.largest_usual_ratio)}"
    yield f"    {moved.figure}: {number(moved.old)} -> {number(moved.new)} ({usual})"


LETTERS = {CaseVerdict.PASS: ".", CaseVerdict.MISMATCH: "M", CaseVerdict.ERROR: "E", CaseVerdict.LOST: "L", None: " "}
LEGEND = "one letter a run: . pass, M mismatch, E error, L lost, blank: not there"
_MOST_SHOWN = 40
"""Cases in the terminal; the JSON and the page have all."""


def history_json(history: SuiteHistory) -> dict[str, Any]:
    """Return a history as plain dicts, lists, strings and finite numbers."""
    runs = [
        {"label": run.label, "begun_at": run.begun_at, "elapsed_s": plain(run.elapsed_s), "counts": run.counts}
        for run in history.runs
    ]
    return {"schema_version": SCHEMA_VERSION, "runs": runs, "cases": [_case_json(trend) for trend in history.trends]}


def history_text(history: SuiteHistory, *, width: int) -> str:
    """Return a history as lines: the runs, then the cases that fail, or whose verdict or numbers changed."""
    shown = [trend for trend in failing_first(history) if is_of_interest(trend)]
    blocks = ["\n".join(_runs_table(history)), f"{history_headline(history)}\n{LEGEND}"]
    if shown:
        header = ("case", "runs", "fails since", "first divergence", "bits changed", "seconds")
        rows = [case_row(history, trend) for trend in shown[:_MOST_SHOWN]]
        dispensable = ("seconds", "bits changed", "first divergence")
        blocks.append(fitted_table(rows, header, width=width, dispensable=dispensable))
    if len(shown) > _MOST_SHOWN:
        blocks.append(f"and {len(shown) - _MOST_SHOWN} more: --format json, --out PAGE")
    return "\n\n".join(blocks) + "\n"


def history_headline(history: SuiteHistory) -> str:
    """Return how many cases pass, and how many fail since when, in a line."""
    latest = [trend for trend in history.trends if trend.latest is not None]
    failing = sum(trend.first_failure is not None for trend in latest)
    newly = sum(trend.first_failure == len(history.runs) - 1 for trend in latest)
    parts = [count(len(history.runs), "run"), f"{count(len(latest), 'case')} in the newest"]
    return " · ".join([*parts, f"{failing} not passing, {newly} of them new"])


def failing_first(history: SuiteHistory) -> list[CaseTrend]:
    """Return all trends: those that fail since the latest run first, then those that pass."""
    return sorted(history.trends, key=lambda trend: 1 if trend.first_failure is None else -trend.first_failure)


def is_of_interest(trend: CaseTrend) -> bool:
    """Whether a case does not pass, or its verdict or numbers changed."""
    verdicts = {result.verdict for result in trend.results if result}
    return verdicts != {CaseVerdict.PASS} or bool(trend.changed_bits)


def case_row(history: SuiteHistory, trend: CaseTrend) -> tuple[str, ...]:
    """Return the cells of a case: name, letters, since when it fails, what, where its numbers changed, seconds."""
    since = "" if trend.first_failure is None else history.label_of(trend.first_failure)
    what = "" if trend.latest is None or trend.first_failure is None else " ".join(trend.latest.divergence_text.split())
    bits = ", ".join(history.label_of(run) for run in trend.changed_bits)
    return printable(trend.name), letters(trend), printable(since), printable(what), printable(bits), _seconds(trend)


def letters(trend: CaseTrend) -> str:
    """Return a letter for each run."""
    return "".join(LETTERS[result.verdict if result else None] for result in trend.results)


def _runs_table(history: SuiteHistory) -> Iterator[str]:
    headers = ("run", "label", "begun", *(verdict.value for verdict in CaseVerdict), "seconds")
    rows = [
        (at + 1, printable(run.label or ""), printable(run.begun_at or ""), *run.counts.values(), number(run.elapsed_s))
        for at, run in enumerate(history.runs)
    ]
    yield from tabulate(rows, headers, tablefmt="simple", disable_numparse=True).splitlines()


def _seconds(trend: CaseTrend) -> str:
    known = [result.seconds for result in trend.results if result and result.seconds is not None]
    return "" if not known else f"{number(known[0])} -> {number(known[-1])}"


def _case_json(trend: CaseTrend) -> dict[str, Any]:
    facts = {"first_failure": trend.first_failure, "last_pass": trend.last_pass, "changed_bits": trend.changed_bits}
    return {"name": trend.name, **facts, "runs": [_result_json(result) for result in trend.results]}


def _result_json(result: CaseResult | None) -> dict[str, Any] | None:
    if result is None:
        return None
    names = ("verdict", "code", "first_divergence", "seconds", "figures", "bits")
    return {name: plain(getattr(result, name)) for name in names}
