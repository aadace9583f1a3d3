"""What a parser returned, in one form: content and calls, from a message, from calls alone, or from a stream."""

import html
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.extensions.server.chat.utterances import ToolCall, Utterance


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


Named = tuple[str, str, str]
"""Name, expected and actual."""


def _bytes_read_as(text: str, encoding: str) -> str:
    return text.encode().decode(encoding, "replace")


_CHANGES: dict[str, Callable[[str], str]] = {
    "whitespace around a string is stripped": str.strip,
    "whitespace before a string is stripped": str.lstrip,
    "whitespace behind a string is stripped": str.rstrip,
    "a line end around a string is stripped": lambda own: own.strip("\r\n"),
    "whitespace in a string is run together": lambda own: " ".join(own.split()),
    "line ends in a string are changed": lambda own: own.replace("\r\n", "\n").replace("\r", "\n"),
    "an escape is not undone": lambda own: json.dumps(own, ensure_ascii=False)[1:-1],
    "a Unicode escape is not undone": lambda own: json.dumps(own)[1:-1],
    "an escape of a quote is not undone": lambda own: own.replace('"', '\\"'),
    "an escape is undone twice": lambda own: str(json.loads(f'"{own}"', strict=False)),
    "escapes are undone that are none": lambda own: own.encode("latin-1", "backslashreplace").decode("unicode_escape"),
    "entities of HTML are undone": html.unescape,
    "entities of HTML are written": html.escape,
    "UTF-8 is read as Latin-1": lambda own: _bytes_read_as(own, "latin-1"),
    "UTF-8 is read as ASCII": lambda own: _bytes_read_as(own, "ascii"),
    "normalisation to NFC": lambda own: unicodedata.normalize("NFC", own),
    "normalisation to NFD": lambda own: unicodedata.normalize("NFD", own),
    "normalisation to NFKC": lambda own: unicodedata.normalize("NFKC", own),
    "characters outside of ASCII are lost": lambda own: own.encode("ascii", "ignore").decode(),
    "characters outside of ASCII are replaced": lambda own: own.encode("ascii", "replace").decode(),
    "control characters are lost": lambda own: "".join(item for item in own if unicodedata.category(item) != "Cc"),
    "quotes are changed": lambda own: own.replace("'", '"'),
    "a string is in lower case": str.lower,
}


def name_difference(expected: Utterance, actual: Reading, marks: Sequence[str] | None) -> Named | None:
    """Return name, expected and actual of what differs first; None: it was read as it was written.

    Without `marks` of the format it is only said of a string whether characters are lost, as pieces lose any.
    """
    if actual.wrong:
        return actual.wrong, _shown(expected.calls), actual.shown
    found = _calls(expected.calls, actual)
    if found is not None:
        return found, _shown(expected.calls), _shown(actual.calls)
    for own, read in zip(expected.calls, actual.calls, strict=True):
        for name, first, second in _values(own, read, marks):
            return name, first, second
    return _content(expected, actual, marks)


def _calls(expected: Sequence[ToolCall], actual: Reading) -> str | None:
    """Return what is wrong about the number and the order of calls."""
    places = [[at for at, own in enumerate(expected) if not any(_values(own, call, ()))] for call in actual.calls]
    if len(places) < len(expected):
        is_content = any(own.name in (actual.content or "") for own in expected)
        return "a call is left in the content" if is_content else "a call is missing"
    if len(places) > len(expected):
        is_twice = bool(expected) and all(places)
        return "a call comes twice" if is_twice else "a call is invented"
    is_same = all(at in own for at, own in enumerate(places))
    return None if is_same or not all(places) else "the order of calls is changed"


def held_mark(expected: Utterance, marks: Sequence[str]) -> str | None:
    """Return a mark of the format that stands in an argument, which explains much."""
    text = json.dumps([dict(own.arguments) for own in expected.calls], ensure_ascii=False)
    return next((own for own in marks if own in text), None)


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
        lost, more = [own for own in expected if own not in actual], [own for own in actual if own not in expected]
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
        held = next((own for own in marks if rest.startswith(own)), None)
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
    """Return what is wrong about the content; whitespace around it is anybody's."""
    if actual.content is None or actual.content.strip() == expected.content.strip():
        return None
    own, read = expected.content.strip(), actual.content.strip()
    if not read:
        name = "the content is lost"
    elif own in read and (any(mark in read.replace(own, "") for mark in marks or ()) or not own):
        name = "parts of a call are left in the content"
    else:
        name = _string(own, read, marks and ())
        name += "" if marks is None else ", which is the content"
    name += " beside calls" if expected.calls and marks is not None else ""
    return name, repr(own)[:200], repr(read)[:200]


def _shown(calls: Sequence[ToolCall]) -> str:
    return json.dumps([{"name": own.name, "arguments": dict(own.arguments)} for own in calls], ensure_ascii=False)[:300]
