"""Conversations, and how they are generated: roles, tools and their results, reasoning, and text at its worst."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

_MOST_TURNS = 3


class Feature(StrEnum):
    """A part that a conversation may have, and a template or a server may not take."""

    SYSTEM = "system message"
    HISTORY = "earlier turns"
    EMPTY = "empty content"
    REASONING = "reasoning in history"
    TOOLS = "tools"
    TOOL_CALLS = "tool calls and results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages up to where the assistant's answer begins, and the tools that it may call."""

    messages: tuple[Mapping[str, Any], ...]
    """In HF's form: the arguments of tool calls are mappings."""
    tools: tuple[Mapping[str, Any], ...] = ()

    def changed(self, *messages: Mapping[str, Any]) -> "Conversation":
        """Return other messages with the same tools."""
        return replace(self, messages=messages)

    @property
    def wire(self) -> dict[str, Any]:
        """The fields of a chat's body: the arguments of tool calls are text there."""
        body: dict[str, Any] = {"messages": [_on_wire(message) for message in self.messages]}
        return body | ({"tools": list(self.tools)} if self.tools else {})


def _on_wire(message: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(message)
    if "tool_calls" in own:
        own["tool_calls"] = [with_arguments(call, json.dumps) for call in own["tool_calls"]]
    return own


def with_arguments(call: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are changed."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Return the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WORST = (
    "", " ", "\n", " x", "x ", "x\n\n", "\tx", "a\r\nb", "e\u0301", "\ufb01", "\u212b", "\u200d", "\ufeffx", "\u202ex",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\u0130", "\ud55c\uae00", "\x00", "x  y", "{{ 7 * 7 }}", "</think>",
    "<think>x</think>y", "x" * 300,
)  # fmt: skip


def samples() -> dict[Feature, Conversation]:
    """Return the smallest conversation with each feature."""
    user = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "y"}
    call = _call("0", "Oslo")
    return {
        Feature.SYSTEM: Conversation(messages=({"role": "system", "content": "z"}, user)),
        Feature.HISTORY: Conversation(messages=(user, answer, user)),
        Feature.EMPTY: Conversation(messages=({"role": "user", "content": ""},)),
        Feature.REASONING: Conversation(messages=(user, {**answer, "reasoning_content": "r"}, user)),
        Feature.TOOLS: Conversation(messages=(user,), tools=(_TOOL,)),
        Feature.TOOL_CALLS: Conversation(messages=(user, call, _result("0", "4")), tools=(_TOOL,)),
    }


def _call(number: str, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    own = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [own]}


def _result(number: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def hard_conversations(features: Set[Feature], special: Sequence[str]) -> Iterator[Conversation]:
    """Yield a conversation with each hard text, of a user, and of an assistant where there are earlier turns."""
    for text in (*WORST, *(f"x{own}y" for own in special)):
        if Feature.EMPTY not in features and not text.strip():
            continue
        own = {"role": "user", "content": text}
        yield Conversation(messages=(own,))
        if Feature.HISTORY in features:
            yield Conversation(
                messages=({**own, "content": "x"}, {**own, "role": "assistant"}, {**own, "content": "x"})
            )


def conversations(features: Set[Feature], special: Sequence[str]) -> SearchStrategy[Conversation]:
    """Return a strategy for conversations.

    `special` are texts of special tokens, which users may write.
    """
    return _conversations(frozenset(features), tuple(special))


@st.composite
def _conversations(draw: DrawFn, features: frozenset[Feature], special: tuple[str, ...]) -> Conversation:
    texts = st.text(max_size=8) | st.sampled_from((*WORST, *special, *(f"x{own}y" for own in special)))
    if Feature.EMPTY not in features:
        texts = texts.filter(str.strip)
    messages: list[dict[str, Any]] = []
    if Feature.SYSTEM in features and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    has_tools = Feature.TOOLS in features and draw(st.booleans())
    for turn in range(draw(st.integers(0, _MOST_TURNS - 1)) if Feature.HISTORY in features else 0):
        messages.append({"role": "user", "content": draw(texts)})
        if has_tools and Feature.TOOL_CALLS in features and draw(st.booleans()):
            messages += [_call(str(turn), draw(texts)), _result(str(turn), draw(texts))]
        answer = {"role": "assistant", "content": draw(texts)}
        if Feature.REASONING in features and draw(st.booleans()):
            answer["reasoning_content"] = draw(texts)
        messages.append(answer)
    messages.append({"role": "user", "content": draw(texts)})
    return Conversation(messages=tuple(messages), tools=(_TOOL,) if has_tools else ())
