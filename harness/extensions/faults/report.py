"""The benchmark as tables for people and as JSON."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from harness.extensions.faults.fault import NOTHING
from harness.extensions.faults.score import Alarm, Grade, Rate, Score

RATES = ("detected", "exact", "within_one", "row", "named", "named_wrongly")
_WIDTH = 70


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The scores of all tools on one set of faults and variants."""

    seed: int
    scores: Sequence[Score]
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Whether the first tool detected every fault and passed every sound engine, and was asked of any."""
        first = self.scores[0]
        passed = [alarm.answer is not None and not alarm.is_alarm for alarm in first.alarms]
        results = [*passed, *(grade.detected for grade in first.grades)]
        return bool(results) and all(results)


def as_json(result: Benchmark) -> dict[str, Any]:
    """Return the benchmark under the keys of docs/faults.md."""
    return {
        "schema_version": 2,
        "seed": result.seed,
        "seconds": result.seconds,
        "tools": [_tool_json(score) for score in result.scores],
    }


def _tool_json(score: Score) -> dict[str, Any]:
    return {
        "name": score.tool,
        "is_rule": score.is_rule,
        "num_lines": score.num_lines,
        "num_refused": score.num_refused,
        "median_seconds": score.median_seconds,
        "notes": dict(score.notes),
        **{name: _rate_json(score.rate(name)) for name in RATES},
        "false_alarms": _rate_json(score.false_alarms),
        "num_unanswered": score.num_unanswered,
        "faults": [_grade_json(grade) for grade in score.grades],
        "alarms": [
            {"id": alarm.variant.id, "answer": None if alarm.answer is None else alarm.answer.as_json()}
            for alarm in score.alarms
            if alarm.is_alarm
        ],
    }


def _rate_json(rate: Rate) -> dict[str, Any]:
    return {"count": rate.count, "total": rate.total, "interval": rate.interval}


def _grade_json(grade: Grade) -> dict[str, Any]:
    return {
        "id": grade.fault.id,
        "category": str(grade.fault.category),
        "engine": str(grade.fault.engine),
        **{name: getattr(grade, name) for name in RATES},
        "answer": None if grade.answer is None else grade.answer.as_json(),
        "problem": grade.problem,
    }


def as_markdown(result: Benchmark) -> str:
    """Return the tables in Markdown."""
    return as_text(result, tablefmt="github")


def as_text(result: Benchmark, *, tablefmt: str = "simple") -> str:
    """Return the tables: tools, kinds of mistake, kinds of engine, and every row that is wrong for the first tool."""
    first = result.scores[0]
    parts = [
        _tools(result.scores, tablefmt),
        "Operation right, by kind of mistake:\n\n" + _by(result.scores, _kind_of, tablefmt),
        "Operation right, by kind of engine:\n\n" + _by(result.scores, lambda grade: str(grade.fault.engine), tablefmt),
        f"What {first.tool} has wrong:\n\n" + _wrong(first, tablefmt),
    ]
    notes = [f"- {score.tool}: {text}, {count} times" for score in result.scores for text, count in score.notes.items()]
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts) + "\n"


def _tools(scores: Iterable[Score], tablefmt: str) -> str:
    rows = [
        [
            score.tool + (" (rule)" if score.is_rule else ""),
            len(score.grades),
            *(_shown(score.rate(name)) for name in RATES),
            _shown(score.false_alarms),
            score.num_unanswered,
            f"{score.median_seconds:.1f}",
            score.num_lines,
        ]
        for score in scores
    ]
    headers = [
        "tool", "faults", "detected", "operation", "within one", "row", "named", "wrongly", "alarms", "no answer", "s",
        "lines",
    ]  # fmt: skip
    return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)


def _shown(rate: Rate) -> str:
    low, high = rate.interval
    return f"{rate.count}/{rate.total} ({100 * low:.0f}-{100 * high:.0f} %)" if rate.total else "-"


def _kind_of(grade: Grade) -> str:
    """Return the kind of a mistake; of a drawn one, how it was drawn."""
    fault = grade.fault
    return fault.summary.partition(":")[0] if fault.id.startswith("drawn/") else str(fault.category)


def _by(scores: Sequence[Score], group_of: Callable[[Grade], str], tablefmt: str) -> str:
    rows = []
    for group in sorted({group_of(grade) for score in scores for grade in score.grades}):
        grades = [[grade for grade in score.grades if group_of(grade) == group] for score in scores]
        cells = [f"{sum(grade.exact for grade in part)}/{len(part)}" if part else "-" for part in grades]
        rows.append([group, *cells])
    headers = ["", *(score.tool for score in scores)]
    return tabulate(rows, headers=headers, tablefmt=tablefmt, disable_numparse=True)


def _wrong(score: Score, tablefmt: str) -> str:
    rows = [_wrong_row(grade) for grade in score.grades if not (grade.row and _is_named(grade))]
    rows += [
        [alarm.variant.id, "false alarm" if alarm.is_alarm else "no answer", *_said(alarm)]
        for alarm in score.alarms
        if alarm.is_alarm or alarm.answer is None
    ]
    widths = [None, None, None, None if tablefmt == "github" else _WIDTH]
    headers = ["fault or variant", "wrong", "found first", "said"]
    return tabulate(rows, headers=headers, tablefmt=tablefmt, maxcolwidths=widths, disable_numparse=True)


def _is_named(grade: Grade) -> bool:
    """Return whether the right thing is said of the cause: nothing, where no known cause is true."""
    return grade.named or (grade.fault.cause == NOTHING and not grade.named_wrongly)


def _wrong_row(grade: Grade) -> list[str]:
    wrong = [name for name in ("detected", "exact", "row") if not getattr(grade, name)][:1]
    named = "named wrongly" if grade.named_wrongly else "" if _is_named(grade) else "not named"
    words = {"detected": "not detected", "exact": "operation", "row": "row"}
    return [grade.fault.id, ", ".join([*(words[name] for name in wrong), *([named] if named else [])]), *_said(grade)]


def _said(item: Grade | Alarm) -> list[str]:
    if item.answer is None:
        return ["-", item.problem]
    row = "" if item.answer.row is None else f" {item.answer.row}"
    text = item.answer.error or item.answer.cause or ""
    return [f"{item.answer.operation or '-'}{row}", text.splitlines()[0] if text else ""]
