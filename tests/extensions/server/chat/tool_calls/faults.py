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
        calls = [(own["function"]["name"], json.loads(own["function"]["arguments"])) for own in whole["tool_calls"]]
        return message(whole["content"], [change(*own) for own in calls])

    return faulty


def values(change: Callable[[Any], Any]) -> Any:
    """Change each value, nested ones too."""

    def walk(value):
        if isinstance(value, dict):
            return {key: walk(own) for key, own in value.items()}
        return [walk(own) for own in value] if isinstance(value, list) else change(value)

    return lambda name, arguments: (name, walk(arguments))


def strings(change: Callable[[str], Any]) -> Any:
    return values(lambda own: change(own) if isinstance(own, str) else own)


def calls_by(parse: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    return lambda text, tools: {**(own := parse(text, tools)), "tool_calls": change(own["tool_calls"])}


def until_mark(text, tools):
    found = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)
    try:
        own = [json.loads(item, strict=False) for item in found]
    except ValueError:
        return message(text, [])
    return message(text.partition("<tool_call>")[0], [(item["name"], item["arguments"]) for item in own])


def first_brace(text, tools):
    own = re.search(r'"parameters": (\{[^}]*\})', text)
    sound = llama(text, tools)
    if not sound["tool_calls"]:
        return sound
    return {**sound, "tool_calls": [{"function": {**sound["tool_calls"][0]["function"], "arguments": own[1]}}]}


def number(text: str) -> Any:
    try:
        return int(text)
    except ValueError:
        return text


def escaped_twice(name, arguments):
    return name, {
        key: json.dumps(own)[1:-1] if isinstance(own, str) and not own.isascii() else own
        for key, own in arguments.items()
    }


def empty_text(text, tools):
    whole = hermes(text, tools)
    for own in whole["tool_calls"]:
        if own["function"]["arguments"] == "{}":
            own["function"]["arguments"] = ""
    return whole


def by_name(calls):
    return list({own["function"]["name"]: own for own in calls}.values())


def deltas(parse: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    return lambda pieces, tools: change(list(streamed(parse)(pieces, tools)))


def pieces(parse: Any, change: Callable[[str], str]) -> Any:
    return lambda own, tools: streamed(parse)(map(change, own), tools)


def one_index(own):
    return [{"tool_calls": [{**item["tool_calls"][0], "index": 0}]} if "tool_calls" in item else item for item in own]


def name_each_time(own):
    name = next((part["tool_calls"][0]["function"] for part in own if "tool_calls" in part), {}).get("name")
    whole = [item for item in own if "tool_calls" in item]
    if len(whole) == 2:
        whole[1]["tool_calls"][0]["function"]["name"] = name
    return own


def last_piece_lost(own):
    return (
        own[:-1] if "tool_calls" in own[-1] and len(own[-1]["tool_calls"][0]["function"].get("arguments", "")) else own
    )


def no_split_mark(own, tools):
    """See the beginning of a function only where it comes in one piece."""
    held = list(own)
    is_seen = any("<function=" in item for item in held)
    yield from streamed(qwen3_coder)(held, tools) if is_seen else [{"content": "".join(held)}]


def content_before_mark_lost(own, tools):
    held = list(own)
    at = next((at for at, item in enumerate(held) if "<tool_call>" in item), None)
    if at is not None:
        held[at] = held[at][held[at].find("<tool_call>") :]
    return streamed(hermes)(held, tools)


FAULTS = [
    Fault("a call is left in the content, where an argument holds </tool_call>", "hermes", until_mark),
    Fault("arguments are no JSON", "llama", first_brace),
    Fault("a number turned to a string", "hermes",
          changed(hermes, values(lambda own: own if isinstance(own, bool | str | None) else str(own)))),
    Fault("a string turned to a number", "mistral", changed(mistral, strings(number))),
    Fault("a boolean turned to a string", "qwen3_coder",
          changed(qwen3_coder, values(lambda own: str(own) if isinstance(own, bool) else own))),
    Fault(
        "an object turned to a string",
        "hermes",
        changed(
            hermes,
            lambda name, own: (
                name,
                {key: json.dumps(item) if isinstance(item, dict) else item for key, item in own.items()},
            ),
        ),
    ),
    Fault("a call is missing", "hermes", calls_by(hermes, lambda own: own[:1])),
    Fault("a call is missing", "mistral", calls_by(mistral, by_name)),
    Fault("the order of calls is changed", "mistral", calls_by(mistral, lambda own: own[::-1])),
    Fault("a call comes twice", "hermes", calls_by(hermes, lambda own: own + own[:1])),
    Fault("a Unicode escape is not undone", "hermes", changed(hermes, escaped_twice)),
    Fault(
        "an escape is undone twice",
        "llama",
        changed(llama, strings(lambda own: json.loads(f'"{own}"') if own.startswith("\\u") and len(own) == 6 else own)),
    ),
    Fault("whitespace around a string is stripped", "qwen3_coder", changed(qwen3_coder, strings(str.strip))),
    Fault("entities of HTML are undone", "qwen3_coder", changed(qwen3_coder, strings(html.unescape))),
    Fault("normalisation to NFC", "hermes", changed(hermes, strings(lambda own: unicodedata.normalize("NFC", own)))),
    Fault("characters outside of ASCII are lost", "llama",
          changed(llama, strings(lambda own: own.encode("ascii", "ignore").decode()))),
    Fault("UTF-8 is read as Latin-1", "mistral", changed(mistral, strings(lambda own: own.encode().decode("latin-1")))),
    Fault("quotes are changed", "llama", changed(llama, strings(lambda own: own.replace("'", '"')))),
    Fault("a large number is rounded", "hermes",
          changed(hermes, values(lambda own: float(own) if type(own) is int else own))),
    Fault("an argument is lost", "llama",
          changed(llama, lambda name, own: (name, {key: item for key, item in own.items() if item is not None}))),
    Fault("the arguments of a call are an empty text", "hermes", empty_text),
    Fault(
        "the content is lost beside calls",
        "hermes",
        lambda text, tools: {**(own := hermes(text, tools)), "content": None if own["tool_calls"] else own["content"]},
    ),
    Fault("parts of a call are left in the content beside calls", "hermes",
          lambda text, tools: {**hermes(text, tools), "content": text}),
    Fault(
        "a call is invented",
        "llama",
        lambda text, tools: (
            own if (own := llama(text, tools))["tool_calls"] or "{" not in text else message("", [("weather", {})])
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
          lambda own, tools: streamed(llama)((item.removesuffix("x") for item in own), tools)),
]  # fmt: skip
