"""What an assistant may say: content, and calls of tools with arguments at their worst."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.extensions.server.chat.conversations import WORST, Conversation

USER = {"role": "user", "content": "x"}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip
_NAMES = ("weather", "get_time", "arguments", "a-b")
_PROPERTIES = ("text", "name", "arguments", "n", "parameters", "z_9")
_HARD = (
    *WORST, '"', "\\", '\\"', "\\n", "\\u00e9", "\\\\", "/", "{", "}", "}}", "]", "[{", '{"a": 1}', '"}', '"}}]', "1",
    "1.0", "true", "null", "None", "'", "&lt;", "<", ">", "; ", ", ", ": ", "\u2028", "\x7f", "\u00e9\u20ac",
    "\U0001f600", '", "arguments": {"x": 1}, "y": "',
)  # fmt: skip
_MARK = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{3,40}\]")
"""What looks like a mark of the format: `<tool_call>`, `[TOOL_CALLS]`."""
_CONTENTS = tuple(text for text in WORST if "think" not in text)
"""Reasoning is cut out by other parsers."""
_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_UNIONS = {"string or integer": ["string", "integer"]}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """What the assistant says, and the tools that it has."""

    calls: tuple[ToolCall, ...] = ()
    content: str = ""
    tools: tuple[Mapping[str, Any], ...]

    @property
    def message(self) -> dict[str, Any]:
        """The message in HF's form."""
        calls = [  # Mistral's templates refuse an id that has not nine letters or digits
            {"id": f"call{at:05}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for at, call in enumerate(self.calls)
        ]
        return {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})

    @property
    def conversation(self) -> Conversation:
        """The whole chat."""
        return Conversation(messages=(USER, self.message), tools=self.tools)

    def fits(self) -> bool:
        """Whether the tools have such calls: their names, arguments and types."""
        schemas = {description["function"]["name"]: description["function"]["parameters"] for description in self.tools}
        return all(call.name in schemas and _fits(call.arguments, schemas[call.name]) for call in self.calls)


def _fits(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    has_type = (
        name in schema["properties"] and any(_is_of(value, kind) for kind in _types(schema["properties"][name]))
        for name, value in arguments.items()
    )
    return all(has_type) and set(schema["required"]) <= set(arguments)


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    return [schema["type"]] if isinstance(schema["type"], str) else schema["type"]


def _is_of(value: object, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def tool(name: str, properties: Mapping[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    """Return a tool in HF's form; properties are types by name."""
    types = {property_name: {"type": kind} for property_name, kind in properties.items()}
    schema = {"type": "object", "properties": types, "required": list(required)}
    function = {"name": name, "description": "Do it.", "parameters": schema}
    return {"type": "function", "function": function}


def marks_of(text: str) -> tuple[str, ...]:
    """Return the marks of a format, from the text of a call."""
    return tuple(dict.fromkeys(_MARK.findall(text)))


def samples() -> dict[str, Utterance]:
    """Return the smallest answer with each part that a template may not take."""
    tools = (tool("weather", {"text": "string", "n": "integer", "more": "object"}),)
    call = ToolCall("weather", {"text": "Oslo"})
    return {
        "a call": Utterance(calls=(call,), tools=tools),
        "several calls": Utterance(calls=(call, call), tools=tools),
        "content beside calls": Utterance(calls=(call,), content="y", tools=tools),
        "calls without arguments": Utterance(calls=(ToolCall("weather", {}),), tools=tools),
        "answers without calls": Utterance(content="y", tools=tools),
    }


def hard_answers(marks: Sequence[str]) -> Iterator[Utterance]:
    """Yield an answer with each hard text: as an argument, inside of an object, and as content."""
    tools = samples()["a call"].tools
    for text in (*_HARD, *marks, *(f"x{mark}y" for mark in marks)):
        yield Utterance(calls=(ToolCall("weather", {"text": text}),), tools=tools)
        yield Utterance(calls=(ToolCall("weather", {"more": {text: [text]}, "n": 2**53 + 1}),), tools=tools)
    for text in (*_CONTENTS, "[1]", '{"a": 1}'):
        yield Utterance(content=text, tools=tools)
        yield Utterance(calls=(ToolCall("weather", {}),), content=text, tools=tools)


def answers(parts: Sequence[str], marks: Sequence[str]) -> SearchStrategy[Utterance]:
    """Return a strategy for answers.

    The `parts` are those of `samples`; arguments may hold the format's `marks`.
    """
    return _answers(frozenset(parts), (*_HARD, *marks, *(f"x{mark}y" for mark in marks)))


@st.composite
def _answers(draw: DrawFn, parts: frozenset[str], hard: tuple[str, ...]) -> Utterance:
    values, least = _values(hard), 0 if "calls without arguments" in parts else 1
    properties = st.dictionaries(
        st.sampled_from(_PROPERTIES), st.sampled_from(tuple(values)), min_size=least, max_size=3
    )
    names = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=2, unique=True))
    kinds = {name: draw(properties) for name in names}
    tools = tuple(
        tool(name, {key: _UNIONS.get(kind, kind) for key, kind in kinds[name].items()}, list(kinds[name])[:least])
        for name in names
    )
    fewest = 0 if "answers without calls" in parts else 1
    calls = []
    for _ in range(draw(st.integers(fewest, 3 if "several calls" in parts else 1))):
        name = draw(st.sampled_from(names))
        chosen = [item for at, item in enumerate(kinds[name]) if at < least or draw(st.booleans())]
        calls.append(ToolCall(name, {item: draw(values[kinds[name][item]]) for item in chosen}))
    content = draw(_TEXTS | st.sampled_from(_CONTENTS)) if not calls or "content beside calls" in parts else ""
    return Utterance(calls=tuple(calls), content=content, tools=tools)


@cache
def _values(hard: tuple[str, ...]) -> Mapping[str, SearchStrategy[Any]]:
    """Return strategies for the values of each type."""
    texts = _TEXTS | st.sampled_from(hard)
    integers = st.integers(-9, 99) | st.sampled_from((2**53 + 1, -(10**20)))
    floats = st.sampled_from((0.5, 1e-7, 1e22)) | st.floats(allow_nan=False, allow_infinity=False)
    scalars = texts | integers | floats | st.booleans() | st.none()
    inner = st.recursive(
        scalars,
        lambda strategy: st.lists(strategy, max_size=2) | st.dictionaries(texts, strategy, max_size=2),
        max_leaves=4,
    )
    return {
        "string": texts, "integer": integers, "number": floats, "boolean": st.booleans(), "null": st.none(),
        "array": st.lists(inner, max_size=3), "object": st.dictionaries(texts, inner, max_size=2),
        "string or integer": texts | integers,
    }  # fmt: skip
