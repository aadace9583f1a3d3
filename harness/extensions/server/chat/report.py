"""A check of chats for people: verdict, what it proves, each difference at its shortest conversation."""

import json
from collections.abc import Iterator

from harness.errors import printable
from harness.extensions.server.chat.result import Difference, FunctionDifference, FunctionResult, TokensResult
from harness.extensions.server.report import at_server, curl, not_judged
from harness.report.check.sentences import model_name
from harness.report.check.table import count
from harness.report.terminal import MIN_WIDTH, VERDICTS, blocks_text, fact_lines, headline, wrapped

_MOST_WORDS = 200
_MOST_FUNCTION_WORDS = 400


def tokens_text(result: TokensResult, *, width: int) -> str:
    """Return a check of chats as lines of at most `width` columns, but for commands."""
    width = max(width, MIN_WIDTH)
    where, conversations = at_server(result.server, result.subject), count(result.num_conversations, "conversation")
    head = [headline(VERDICTS[result.outcome], where, model_name(result.model), conversations)]
    head += fact_lines([("by", f"{result.evidence}: {result.proves}"), not_judged(result)], width)
    differences = (_difference(difference, result, width) for difference in result.differences)
    findings = (
        line for finding in result.findings for line in wrapped(f"  {finding.code}", finding.message, width, indent=8)
    )
    return blocks_text([head, *differences, findings, fact_lines(_facts(result), width)])


def _difference(difference: Difference, result: TokensResult, width: int) -> Iterator[str]:
    yield from wrapped(f"  {difference.code}", printable(difference.name), width, indent=8)
    for message in difference.messages:
        others = {name: value for name, value in message.items() if name not in ("role", "content")}
        words = f"{message['content']!r}" + (f" {json.dumps(others)}" if others else "")
        yield from wrapped(f"          {message['role']}", _cut(words), width, indent=22)
    for tool in difference.tools:
        yield from wrapped("          tool", _cut(json.dumps(tool)), width, indent=22)
    yield from wrapped("        expected", printable(difference.expected), width, indent=18)
    yield from wrapped("        actual", printable(difference.actual), width, indent=18)
    if difference.body is not None:
        yield f"        {curl(f'{result.subject}{difference.path}', difference.body)}"


def _cut(text: str) -> str:
    return printable(text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]}...")


def _facts(result: TokensResult) -> Iterator[tuple[str, str]]:
    yield "with", ", ".join(result.features) or "one message of a user each"
    if result.num_texts:
        yield "texts", f"{count(result.num_texts, 'text')} tokenised by /tokenize"
    if result.num_ends:
        yield "ends", f"{count(result.num_ends, 'end token')} of the model's configuration tried"
    if result.num_answers:
        yield "answers", f"the text of {count(result.num_answers, 'answer')} judged"
    yield from (("note", note) for note in result.notes)


def function_text(result: FunctionResult, *, width: int) -> str:
    """Return a check of a function as lines of at most `width` columns."""
    extent = [count(num, name) for name, num in result.counts.items() if num]
    head = [headline(VERDICTS[result.outcome], result.subject, model_name(result.model), *extent)]
    head += fact_lines([not_judged(result)], width)
    notes = fact_lines((("note", note) for note in result.notes), width)
    return blocks_text([head, *(_function_difference(difference, width) for difference in result.differences), notes])


def _function_difference(difference: FunctionDifference, width: int) -> Iterator[str]:
    yield from wrapped(f"  {difference.code}", printable(difference.name), width, indent=8)
    for name, words in difference.shown.items():
        cut = words if len(words) <= _MOST_FUNCTION_WORDS else f"{words[:_MOST_FUNCTION_WORDS]}..."
        yield from wrapped(f"        {name}", printable(cut), width, indent=18)
