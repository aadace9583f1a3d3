"""Changes between two runs of a suite, for people and for programs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.extensions.suite.result import CaseResult, Moved, SuiteDiff
from harness.report.check.sentences import number, printable
from harness.report.check.table import count
from harness.report.document import SCHEMA_VERSION, plain
from harness.report.terminal import blocks_text


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


def _block(title: str, found: Sequence[Any], lines_of: Callable[[Any], Iterator[str]]) -> list[str]:
    return [f"{title} ({len(found)})", *(line for item in found for line in lines_of(item))] if found else []


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
