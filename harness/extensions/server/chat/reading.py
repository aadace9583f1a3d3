"""What a parser reads, in one form, and the names of its differences from what was written."""

import html
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.extensions.server.chat.utterances import ToolCall, Utterance

Named = tuple[str, str, str]
"""Name, expected and actual."""


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
    message = _plain(returned)
    if isinstance(message, list | tuple):
        return Reading(tuple(map(_call, message)))
    if not isinstance(message, Mapping) or not {"content", "tool_calls"} & set(message):
        raise FormError("the parser returns no message and no list of calls", message)
    calls, content = message.get("tool_calls") or [], message.get("content")
    if not isinstance(calls, list | tuple) or not isinstance(content, str | None):
        raise FormError("the message has another form than OpenAI's", message)
    return Reading(tuple(map(_call, calls)), content or "")


def read_stream(deltas: Iterable[Any]) -> Reading:
    """Return a reading of deltas in OpenAI's form, joined as OpenAI's client joins them; raises FormError."""
    content, calls = "", dict[int, dict[str, str]]()
    for delta in (_plain(returned) for returned in deltas if returned is not None):
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
    call = calls.setdefault(at, {"name": "", "arguments": ""})
    for field in call:
        piece = function.get(field)
        if not isinstance(piece, str | None):
            raise FormError(f"a piece of the {field} is no text", part)
        call[field] += piece or ""


def _plain(value: Any) -> Any:
    """Return an object of pydantic's as a mapping, others as they are."""
    return value.model_dump() if hasattr(value, "model_dump") else value


def _call(value: Any) -> ToolCall:
    call = _plain(value)
    call = _plain(call.get("function") or call) if isinstance(call, Mapping) else call
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str) or "arguments" not in call:
        raise FormError("a call has no name or no arguments", value)
    arguments = call["arguments"]
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    try:
        arguments = json.loads(json.dumps(arguments))
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise FormError("the arguments of a call are no JSON object", call["arguments"])
    return ToolCall(call["name"], arguments)


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
    for token in whole:
        begin = text.find(token)
        while token and begin >= 0:
            ends -= set(range(begin + 1, begin + len(token)))
            begin = text.find(token, begin + 1)
    return tuple(text[first:last] for first, last in pairwise(sorted(ends | {0, len(text)})))


def _bytes_read_as(text: str, encoding: str) -> str:
    return text.encode().decode(encoding, "replace")


_CHANGES: dict[str, Callable[[str], str]] = {
    "whitespace around a string is stripped": str.strip,
    "whitespace before a string is stripped": str.lstrip,
    "whitespace behind a string is stripped": str.rstrip,
    "a line end around a string is stripped": lambda text: text.strip("\r\n"),
    "whitespace in a string is run together": lambda text: " ".join(text.split()),
    "line ends in a string are changed": lambda text: text.replace("\r\n", "\n").replace("\r", "\n"),
    "an escape is not undone": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "a Unicode escape is not undone": lambda text: json.dumps(text)[1:-1],
    "an escape of a quote is not undone": lambda text: text.replace('"', '\\"'),
    "an escape is undone twice": lambda text: str(json.loads(f'"{text}"', strict=False)),
    "escapes are undone that are none": lambda text: text.encode("latin-1", "backslashreplace").decode(
        "unicode_escape"
    ),
    "entities of HTML are undone": html.unescape,
    "entities of HTML are written": html.escape,
    "UTF-8 is read as Latin-1": lambda text: _bytes_read_as(text, "latin-1"),
    "UTF-8 is read as ASCII": lambda text: _bytes_read_as(text, "ascii"),
    "normalisation to NFC": lambda text: unicodedata.normalize("NFC", text),
    "normalisation to NFD": lambda text: unicodedata.normalize("NFD", text),
    "normalisation to NFKC": lambda text: unicodedata.normalize("NFKC", text),
    "characters outside of ASCII are lost": lambda text: text.encode("ascii", "ignore").decode(),
    "characters outside of ASCII are replaced": lambda text: text.encode("ascii", "replace").decode(),
    "control characters are lost": lambda text: "".join(item for item in text if unicodedata.category(item) != "Cc"),
    "quotes are changed": lambda text: text.replace("'", '"'),
    "a string is in lower case": str.lower,
}


def name_difference(expected: Utterance, actual: Reading, marks: Sequence[str] | None) -> Named | None:
    """Return name, expected and actual of what differs first; None: it was read as it was written.

    Without `marks` of the format it is only said of a string whether characters are lost, as pieces lose any.
    """
    if actual.wrong:
        return actual.wrong, _shown(expected.calls), actual.shown
    wrong_calls = _calls(expected.calls, actual)
    if wrong_calls is not None:
        return wrong_calls, _shown(expected.calls), _shown(actual.calls)
    for written, read in zip(expected.calls, actual.calls, strict=True):
        for name, first, second in _values(written, read, marks):
            return name, first, second
    return _content(expected, actual, marks)


def _calls(expected: Sequence[ToolCall], actual: Reading) -> str | None:
    """Return what is wrong about the number and the order of calls."""
    places = [
        [at for at, written in enumerate(expected) if not any(_values(written, call, ()))] for call in actual.calls
    ]
    if len(places) < len(expected):
        is_content = any(written.name in (actual.content or "") for written in expected)
        return "a call is left in the content" if is_content else "a call is missing"
    if len(places) > len(expected):
        is_twice = bool(expected) and all(places)
        return "a call comes twice" if is_twice else "a call is invented"
    is_same = all(at in possible for at, possible in enumerate(places))
    return None if is_same or not all(places) else "the order of calls is changed"


def held_mark(expected: Utterance, marks: Sequence[str]) -> str | None:
    """Return a mark of the format that an argument contains: it explains many differences."""
    text = json.dumps([dict(call.arguments) for call in expected.calls], ensure_ascii=False)
    return next((mark for mark in marks if mark in text), None)


def _values(expected: ToolCall, actual: ToolCall, marks: Sequence[str] | None) -> Iterator[Named]:
    if expected.name != actual.name:
        is_twice = actual.name == 2 * expected.name
        name = "the name of a call comes twice" if is_twice else "the name of a call is changed"
        yield name, repr(expected.name), repr(actual.name)
    else:
        yield from _walk(expected.arguments, actual.arguments, "an argument", marks)


def _walk(expected: Any, actual: Any, what: str, marks: Sequence[str] | None) -> Iterator[Named]:
    """Yield how two values differ."""
    kinds = _kind(expected), _kind(actual)
    shown = repr(expected)[:200], repr(actual)[:200]
    if kinds[0] != kinds[1]:
        yield f"{kinds[0]} turned to {kinds[1]}", *shown
    elif isinstance(expected, Mapping):
        lost, more = [key for key in expected if key not in actual], [key for key in actual if key not in expected]
        if lost and len(lost) == len(more):
            yield _string(lost[0], more[0], marks) + ("" if marks is None else f", which names {what}"), *shown
        elif lost or more:
            yield f"{what} is {'lost' if lost else 'invented'}", *shown
        for key in expected if not lost and not more else ():
            yield from _walk(expected[key], actual[key], "a key of an object", marks)
    elif isinstance(expected, list):
        if len(expected) != len(actual):
            yield f"elements of an array are {'lost' if len(actual) < len(expected) else 'added'}", *shown
        for pair in zip(expected, actual, strict=False):
            yield from _walk(*pair, what, marks)
    elif expected != actual and isinstance(expected, str):
        yield _string(expected, actual, marks), *shown
    elif expected != actual:
        is_rounded = isinstance(actual, float) and float(expected) == actual
        yield "a large number is rounded" if is_rounded else "a number is changed", *shown


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", type(None): "null", str: "a string", list: "an array"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else "an object")


def _string(expected: str, actual: str, marks: Sequence[str] | None) -> str:
    """Return what was done to a string."""
    if any("\ud800" <= item <= "\udfff" for item in actual):
        return "half a character of an escape is left"
    for name, change in _CHANGES.items() if marks is not None else ():
        try:
            if change(expected) == actual:
                return name
        except (ValueError, UnicodeError):
            continue
    if marks is not None and expected.startswith(actual):
        rest = expected[len(actual) :].lstrip()
        held = next((mark for mark in marks if rest.startswith(mark)), None)
        return "the end of a string is lost" if held is None else f"a string ends where it holds {held}"
    if marks is not None and expected.endswith(actual):
        return "the beginning of a string is lost"
    whose = "" if marks is None else " of a string"
    for how, whole, part in (("lost", expected, actual), ("added", actual, expected)):
        letters = iter(whole)
        if all(item in letters for item in part):
            return f"characters{whose} are {how}"
    return f"characters{whose} are changed"


def _content(expected: Utterance, actual: Reading, marks: Sequence[str] | None) -> Named | None:
    """Return what is wrong about the content; whitespace around it is not judged."""
    if actual.content is None or actual.content.strip() == expected.content.strip():
        return None
    written, read = expected.content.strip(), actual.content.strip()
    if not read:
        name = "the content is lost"
    elif written in read and (any(mark in read.replace(written, "") for mark in marks or ()) or not written):
        name = "parts of a call are left in the content"
    else:
        name = _string(written, read, marks and ())
        name += "" if marks is None else ", which is the content"
    name += " beside calls" if expected.calls and marks is not None else ""
    return name, repr(written)[:200], repr(read)[:200]


def _shown(calls: Sequence[ToolCall]) -> str:
    plain = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    return json.dumps(plain, ensure_ascii=False)[:300]
