"""A check of chats for people: verdict, what it proves, each difference at its shortest conversation."""

import json
from collections.abc import Iterator

from harness.report.check.sentences import printable
from harness.report.check.table import count
from harness.report.endpoint.headline import headline, not_judged
from harness.report.endpoint.request import curl
from harness.report.endpoint.text import MIN_WIDTH
from harness.report.wrapped import wrapped
from harness.results.tokens import Difference, TokensResult

_MOST_WORDS = 200


def tokens_text(result: TokensResult, *, width: int) -> str:
    """Return a check of chats as lines of at most `width` columns, but for commands."""
    width = max(width, MIN_WIDTH)
    blocks = [list(_headline(result, width)), *(list(_difference(each, result, width)) for each in result.differences)]
    blocks += [[line for each in result.findings for line in wrapped(f"  {each.code}", each.message, width, indent=8)]]
    blocks += [list(_facts(result, width))]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _headline(result: TokensResult, width: int) -> Iterator[str]:
    conversations = count(result.num_conversations, "conversation")
    yield headline(result.outcome, result.server, result.subject, result.model, conversations)
    yield from wrapped("  by", f"{result.evidence}: {result.proves}", width)
    yield from wrapped("  not judged", not_judged(result.not_judged), width)


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


def _facts(result: TokensResult, width: int) -> Iterator[str]:
    yield from wrapped("  with", ", ".join(result.features) or "one message of a user each", width)
    if result.num_texts:
        yield from wrapped("  texts", f"{count(result.num_texts, 'text')} tokenised by /tokenize", width)
    if result.num_ends:
        yield from wrapped("  ends", f"{count(result.num_ends, 'end token')} of the model's configuration tried", width)
    if result.num_answers:
        yield from wrapped("  answers", f"the text of {count(result.num_answers, 'answer')} judged", width)
    for note in result.notes:
        yield from wrapped("  note", printable(note), width)
