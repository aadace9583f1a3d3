"""A check of a user's function for people: verdict, each difference at its smallest input, notes."""

from collections.abc import Iterator

from harness.extensions.server.chat.result import FunctionDifference, FunctionResult
from harness.extensions.server.endpoint.report import not_judged
from harness.report.check.sentences import model_name, printable
from harness.report.check.table import count
from harness.report.terminal import VERDICTS, blocks_text, fact_lines, headline, wrapped

_MOST_WORDS = 400


def function_text(result: FunctionResult, *, width: int) -> str:
    """Return a check of a function as lines of at most `width` columns."""
    extent = [count(num, name) for name, num in result.counts.items() if num]
    head = [headline(VERDICTS[result.outcome], result.subject, model_name(result.model), *extent)]
    head += fact_lines([not_judged(result)], width)
    notes = fact_lines((("note", note) for note in result.notes), width)
    return blocks_text([head, *(_difference(own, width) for own in result.differences), notes])


def _difference(own: FunctionDifference, width: int) -> Iterator[str]:
    yield from wrapped(f"  {own.code}", printable(own.name), width, indent=8)
    for name, words in own.shown.items():
        cut = words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}..."
        yield from wrapped(f"        {name}", printable(cut), width, indent=18)
