"""Parsers with one fault each, and the names that they must get."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .parsers import hermes, llama, message, mistral, qwen3_coder, streamed


@dataclass(frozen=True)
class Fault:
    """One thing that a parser does wrong."""

    name: str
    """What it must be called."""
    family: str
    parse: Callable[..., Any]
    stream: Callable[..., Any] | None = None


def changed(parse: Any, change: Callable[[str, dict[str, Any]], Any]) -> Any:
    """Change the name and the arguments of each call."""

    def faulty(text, tools):
        whole = parse(text, tools)
        calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in whole["tool_calls"]]
        return message(whole["content"], [change(*call) for call in calls])

    return faulty


def values(change: Callable[[Any], Any]) -> Any:
    """Change each value, nested ones too."""

    def walk(value):
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else change(value)

    return lambda name, arguments: (name, walk(arguments))


def strings(change: Callable[[str], Any]) -> Any:
    return values(lambda value: change(value) if isinstance(value, str) else value)


def calls_by(parse: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    return lambda text, tools: {**(whole := parse(text, tools)), "tool_calls": change(whole["tool_calls"])}


def until_mark(text, tools):
    texts = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)
    try:
        calls = [json.loads(item, strict=False) for item in texts]
    except ValueError:
        return message(text, [])
    return message(text.partition("<tool_call>")[0], [(item["name"], item["arguments"]) for item in calls])


def first_brace(text, tools):
    match = re.search(r'"parameters": (\{[^}]*\})', text)
    sound = llama(text, tools)
    if not sound["tool_calls"]:
        return sound
    return {**sound, "tool_calls": [{"function": {**sound["tool_calls"][0]["function"], "arguments": match[1]}}]}


def number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def escaped_twice(name, arguments):
    return name, {
        key: json.dumps(value)[1:-1] if isinstance(value, str) and not value.isascii() else value
        for key, value in arguments.items()
    }


def empty_text(text, tools):
    whole = hermes(text, tools)
    for call in whole["tool_calls"]:
        if call["function"]["arguments"] == "{}":
            call["function"]["arguments"] = ""
    return whole


def by_name(calls):
    return list({call["function"]["name"]: call for call in calls}.values())


def deltas(parse: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    return lambda pieces, tools: change(list(streamed(parse)(pieces, tools)))


def pieces(parse: Any, change: Callable[[str], str]) -> Any:
    return lambda parts, tools: streamed(parse)(map(change, parts), tools)


def one_index(parts):
    return [{"tool_calls": [{**item["tool_calls"][0], "index": 0}]} if "tool_calls" in item else item for item in parts]


def name_each_time(parts):
    name = next((part["tool_calls"][0]["function"] for part in parts if "tool_calls" in part), {}).get("name")
    whole = [item for item in parts if "tool_calls" in item]
    if len(whole) == 2:
        whole[1]["tool_calls"][0]["function"]["name"] = name
    return parts


def last_piece_lost(parts):
    return (
        parts[:-1]
        if "tool_calls" in parts[-1] and len(parts[-1]["tool_calls"][0]["function"].get("arguments", ""))
        else parts
    )


def no_split_mark(parts, tools):
    """See the beginning of a function only where it comes in one piece."""
    held = list(parts)
    is_seen = any("<function=" in item for item in held)
    yield from streamed(qwen3_coder)(held, tools) if is_seen else [{"content": "".join(held)}]


def content_before_mark_lost(parts, tools):
    held = list(parts)
    at = next((at for at, item in enumerate(held) if "<tool_call>" in item), None)
    if at is not None:
        held[at] = held[at][held[at].find("<tool_call>") :]
    return streamed(hermes)(held, tools)


FAULTS = [
    Fault("a call is left in the content, where an argument holds </tool_call>", "hermes", until_mark),
    Fault("arguments are no JSON", "llama", first_brace),
    Fault("a number turned to a string", "hermes",
          changed(hermes, values(lambda value: value if isinstance(value, bool | str | None) else str(value)))),
    Fault("a string turned to a number", "mistral", changed(mistral, strings(number))),
    Fault("a boolean turned to a string", "qwen3_coder",
          changed(qwen3_coder, values(lambda value: str(value) if isinstance(value, bool) else value))),
    Fault(
        "an object turned to a string",
        "hermes",
        changed(
            hermes,
            lambda name, arguments: (
                name,
                {key: json.dumps(item) if isinstance(item, dict) else item for key, item in arguments.items()},
            ),
        ),
    ),
    Fault("a call is missing", "hermes", calls_by(hermes, lambda calls: calls[:1])),
    Fault("a call is missing", "mistral", calls_by(mistral, by_name)),
    Fault("the order of calls is changed", "mistral", calls_by(mistral, lambda calls: calls[::-1])),
    Fault("a call comes twice", "hermes", calls_by(hermes, lambda calls: calls + calls[:1])),
    Fault("a Unicode escape is not undone", "hermes", changed(hermes, escaped_twice)),
    Fault(
        "an escape is undone twice",
        "llama",
        changed(llama, strings(lambda text: json.loads(f'"{text}"') if re.fullmatch(r"\\u.{4}", text, re.S) else text)),
    ),
    Fault("whitespace around a string is stripped", "qwen3_coder", changed(qwen3_coder, strings(str.strip))),
    Fault("entities of HTML are undone", "qwen3_coder", changed(qwen3_coder, strings(html.unescape))),
    Fault("normalisation to NFC", "hermes", changed(hermes, strings(lambda text: unicodedata.normalize("NFC", text)))),
    Fault("characters outside of ASCII are lost", "llama",
          changed(llama, strings(lambda text: text.encode("ascii", "ignore").decode()))),
    Fault("UTF-8 is read as Latin-1", "mistral",
          changed(mistral, strings(lambda text: text.encode().decode("latin-1")))),
    Fault("quotes are changed", "llama", changed(llama, strings(lambda text: text.replace("'", '"')))),
    Fault("a large number is rounded", "hermes",
          changed(hermes, values(lambda value: float(value) if type(value) is int else value))),
    Fault("an argument is lost", "llama",
          changed(llama, lambda name, values: (name, {key: item for key, item in values.items() if item is not None}))),
    Fault("the arguments of a call are an empty text", "hermes", empty_text),
    Fault(
        "the content is lost beside calls",
        "hermes",
        lambda text, tools: (read := hermes(text, tools)) | ({"content": None} if read["tool_calls"] else {}),
    ),
    Fault("parts of a call are left in the content beside calls", "hermes",
          lambda text, tools: {**hermes(text, tools), "content": text}),
    Fault(
        "a call is invented",
        "llama",
        lambda text, tools: (
            whole if (whole := llama(text, tools))["tool_calls"] or "{" not in text else message("", [("weather", {})])
        ),
    ),
    Fault("the arguments of a call end too early, in a stream", "hermes", hermes, deltas(hermes, last_piece_lost)),
    Fault("the name of a call comes twice, in a stream", "hermes", hermes, deltas(hermes, name_each_time)),
    Fault("something stands behind the arguments of a call, in a stream", "mistral", mistral,
          deltas(mistral, one_index)),
    Fault("a call is left in the content, at a boundary of pieces", "qwen3_coder", qwen3_coder, no_split_mark),
    Fault("characters are lost, at a boundary of pieces", "hermes", hermes, content_before_mark_lost),
    Fault("characters are lost, at a boundary of pieces", "llama", llama, pieces(llama, str.lstrip)),
    Fault("characters are lost, at a boundary of pieces", "llama", llama,
          lambda parts, tools: streamed(llama)((item.removesuffix("x") for item in parts), tools)),
]  # fmt: skip
