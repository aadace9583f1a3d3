"""Faults in how a server makes tokens of a conversation, each with the name that it must get."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .conftest import SPECIAL

Messages = list[dict[str, Any]]
Render = Callable[..., list[int]]
MARK = "\ue000"
MARK_BYTES = MARK.encode()


@dataclass(frozen=True)
class Fault:
    """One thing that a server does wrong."""

    name: str
    """Part of the name that it must get."""
    render: Callable[[Render, Messages, Any], list[int]]
    """Takes HF's rendering, messages and tools."""


def contents(change: Callable[[str], str], *roles: str) -> Any:
    def render(hf: Render, messages: Messages, tools: Any) -> list[int]:
        def changed(message: Any) -> Any:
            is_meant = not roles or message["role"] in roles
            return {**message, "content": change(message["content"])} if is_meant else message

        return hf([changed(message) for message in messages], tools)

    return render


def messages_by(change: Callable[[Messages], Messages]) -> Any:
    return lambda hf, messages, tools: hf(change(messages), tools)


def without(field: str) -> Any:
    return messages_by(
        lambda messages: [{key: value for key, value in item.items() if key != field} for item in messages]
    )


def special_as_text(hf: Render, messages: Messages, tools: Any) -> list[int]:
    def split(text: str) -> str:
        for token in SPECIAL:
            text = text.replace(token, f"{token[:2]}{MARK}{token[2:]}")
        return text

    ids = contents(split)(hf, messages, tools)
    mark = hf.tokenizer(MARK, add_special_tokens=False)["input_ids"]  # type: ignore[attr-defined]
    text = ",".join(map(str, ids)) + ","
    return [int(word) for word in text.replace("".join(f"{item}," for item in mark), "").split(",") if word]


def text_arguments(messages: Messages) -> Messages:
    text = json.dumps(messages)
    return json.loads(
        re.sub(r'"arguments": (\{"city": "(?:[^"\\]|\\.)*"\})', lambda m: f'"arguments": {json.dumps(m[1])}', text)
    )


def dated(hf: Render, messages: Messages, tools: Any) -> list[int]:
    first = messages[0]
    if first["role"] == "system":
        messages = [{**first, "content": f"Today is 2026-11-23. {first['content']}"}, *messages[1:]]
    return hf(messages, tools)


def refuse_emoji(hf: Render, messages: Messages, tools: Any) -> list[int]:
    if any(ord(item) > 0xFFFF for message in messages for item in message["content"]):
        raise ValueError("no text")
    return hf(messages, tools)


FAULTS = [
    Fault("BOS twice", lambda hf, messages, tools: [256, *hf(messages, tools)]),
    Fault("no BOS", lambda hf, messages, tools: hf(messages, tools)[1:]),
    Fault("EOS at the end", lambda hf, messages, tools: [*hf(messages, tools), 258]),
    Fault("no generation prompt", lambda hf, messages, tools: hf(messages, tools, has_prompt=False)),
    Fault("tools dropped", lambda hf, messages, tools: hf(messages, None)),
    Fault("system message dropped",
          messages_by(lambda messages: [item for item in messages if item["role"] != "system"])),
    Fault("whitespace stripped", contents(str.strip)),
    Fault("whitespace stripped at the end", contents(str.rstrip)),
    Fault("whitespace of the assistant stripped", contents(str.strip, "assistant")),
    Fault("whitespace run together", contents(lambda text: re.sub(r"\s+", " ", text))),
    Fault("line ends changed", contents(lambda text: text.replace("\r\n", "\n"))),
    Fault("reasoning removed from history", without("reasoning_content")),
    Fault("thinking cut out of the content", contents(lambda text: text.rpartition("</think>")[2])),
    Fault("tool calls dropped", without("tool_calls")),
    Fault("tool results dropped", messages_by(lambda messages: [item for item in messages if item["role"] != "tool"])),
    Fault("arguments of tool calls as text", messages_by(text_arguments)),
    Fault("empty messages dropped", messages_by(
        lambda messages: [item for item in messages if item["content"].strip() or "tool_calls" in item] or messages)),
    Fault("earlier turns dropped", messages_by(lambda messages: messages[-1:])),
    Fault("a date is inserted", dated),
    Fault("normalisation to NFC", contents(lambda text: unicodedata.normalize("NFC", text))),
    Fault("normalisation to NFKC", contents(lambda text: unicodedata.normalize("NFKC", text))),
    Fault("characters outside of ASCII replaced", contents(lambda text: text.encode("ascii", "replace").decode())),
    Fault("text in lower case", contents(str.lower)),
    Fault("special tokens in the text taken for text", special_as_text),
    Fault("the text taken for a template", contents(lambda text: text.replace("{{ 7 * 7 }}", "49"))),
    Fault("the beginning is cut off", lambda hf, messages, tools: hf(messages, tools)[-200:]),
    Fault("the conversation is refused", refuse_emoji),
    Fault("other tokens, for no reason that is known", lambda hf, messages, tools: [*hf(messages, tools)[:-2], 5, 5]),
]  # fmt: skip
