"""What a parser returned, in one form: content and calls, from a message, from calls alone, or from a stream."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.extensions.server.chat.tool_calls.answers import ToolCall


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read out of a text; a wrong form, an exception or a hang are readings too."""

    calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    """None: the parser returns calls alone."""
    wrong: str = ""
    """The name of what is wrong about its form."""
    shown: str = ""


class FormError(Exception):
    """The parser returned something else: the name of that, and what it returned."""


def read_message(returned: Any) -> Reading:
    """Return a reading of a message in OpenAI's form, or of a list of calls; raises FormError."""
    own = _plain(returned)
    if isinstance(own, list | tuple):
        return Reading(tuple(map(_call, own)))
    if not isinstance(own, Mapping) or not {"content", "tool_calls"} & set(own):
        raise FormError("the parser returns no message and no list of calls", own)
    calls, content = own.get("tool_calls") or [], own.get("content")
    if not isinstance(calls, list | tuple) or not isinstance(content, str | None):
        raise FormError("the message has another form than OpenAI's", own)
    return Reading(tuple(map(_call, calls)), content or "")


def read_stream(deltas: Iterable[Any]) -> Reading:
    """Return a reading of deltas in OpenAI's form, joined as OpenAI's client joins them; raises FormError."""
    content, calls = "", dict[int, dict[str, str]]()
    for delta in (_plain(own) for own in deltas if own is not None):
        if not isinstance(delta, Mapping) or not isinstance(delta.get("content"), str | None):
            raise FormError("a delta has another form than OpenAI's", delta)
        content += delta.get("content") or ""
        for part in delta.get("tool_calls") or []:
            _join(calls, _plain(part))
    return Reading(tuple(_call(calls[at]) for at in sorted(calls)), content)


def _join(calls: dict[int, dict[str, str]], part: Any) -> None:
    at = part.get("index") if isinstance(part, Mapping) else None
    function = _plain(part.get("function") or {}) if isinstance(part, Mapping) else None
    if not isinstance(at, int) or not isinstance(function, Mapping):
        raise FormError("a call's delta has no index", part)
    own = calls.setdefault(at, {"name": "", "arguments": ""})
    for field in own:
        piece = function.get(field)
        if not isinstance(piece, str | None):
            raise FormError(f"a piece of the {field} is no text", part)
        own[field] += piece or ""


def _plain(value: Any) -> Any:
    """Return an object of pydantic's as a mapping, others as they are."""
    return value.model_dump() if hasattr(value, "model_dump") else value


def _call(value: Any) -> ToolCall:
    own = _plain(value)
    own = _plain(own.get("function") or own) if isinstance(own, Mapping) else own
    if not isinstance(own, Mapping) or not isinstance(own.get("name"), str) or "arguments" not in own:
        raise FormError("a call has no name or no arguments", value)
    arguments = own["arguments"]
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    try:
        arguments = json.loads(json.dumps(arguments))
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise FormError("the arguments of a call are no JSON object", own["arguments"])
    return ToolCall(own["name"], arguments)


def _decoded(text: str) -> Any:
    if not text.strip():
        raise FormError("the arguments of a call are an empty text", text)
    try:
        value, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError) as error:
        is_cut = not text.rstrip().endswith("}") or "Unterminated" in str(error)
        raise FormError("the arguments of a call end too early" if is_cut else "arguments are no JSON", text) from None
    if text.lstrip()[end:].strip():
        raise FormError("something stands behind the arguments of a call", text)
    return value


def pieces_of(text: str, size: int, at: int, whole: Sequence[str]) -> tuple[str, ...]:
    """Cut a text into pieces.

    Pieces have `size` characters; 0: there are two, and the first ends `at` a place. Tokens in `whole` stay whole.
    """
    ends = {at % (len(text) + 1)} if not size else set(range(at % size, len(text), size))
    for own in whole:
        begin = text.find(own)
        while own and begin >= 0:
            ends -= set(range(begin + 1, begin + len(own)))
            begin = text.find(own, begin + 1)
    return tuple(text[first:last] for first, last in pairwise(sorted(ends | {0, len(text)})))
