"""A check of a user's function for people: verdict, each difference at its smallest input, notes."""

from collections.abc import Iterator

from harness.report.check.sentences import printable
from harness.report.check.table import count
from harness.report.endpoint.headline import headline, not_judged
from harness.report.wrapped import wrapped
from harness.results.function import FunctionDifference, FunctionResult

_MOST_WORDS = 400


def function_text(result: FunctionResult, *, width: int) -> str:
    """Return a check of a function as lines of at most `width` columns."""
    extent = [count(num, name) for name, num in result.counts.items() if num]
    head = [headline(result.outcome, "", result.subject, result.model, *extent)]
    head += wrapped("  not judged", not_judged(result.not_judged), width)
    notes = [line for note in result.notes for line in wrapped("  note", printable(note), width)]
    blocks = [head, *(list(_difference(own, width)) for own in result.differences), notes]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _difference(own: FunctionDifference, width: int) -> Iterator[str]:
    yield from wrapped(f"  {own.code}", printable(own.name), width, indent=8)
    for name, words in own.shown.items():
        cut = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."
        yield from wrapped(f"        {name}", printable(cut), width, indent=18)
