"""Conversations: how they are generated, and how HF's chat template renders them."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from harness.base.plugins import require_hypothesis
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import HFTokenizer
from harness.formats.checkpoint.template import TemplateLimitError, render

require_hypothesis("generating conversations", __name__)
from hypothesis import strategies as st  # noqa: E402
from hypothesis.strategies import DrawFn, SearchStrategy  # noqa: E402

_MOST_TURNS = 3
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
    on_wire = dict(message)
    if "tool_calls" in on_wire:
        on_wire["tool_calls"] = [with_arguments(call, json.dumps) for call in on_wire["tool_calls"]]
    return on_wire


def with_arguments(call: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are changed."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a server saw of a conversation; None where its answer does not show it."""

    token_ids: tuple[int, ...] | None = None
    is_first_hidden: bool = False
    """Whether the server hides the first token, which is taken to be HF's."""
    text: str | None = None
    count: int | None = None
    """Number of tokens by the server's own count."""
    refusal: str | None = None
    """The words in the place of an answer."""


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
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(number: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


def hard_conversations(features: Set[Feature], special: Sequence[str]) -> Iterator[Conversation]:
    """Yield a conversation with each hard text, of a user, and of an assistant where there are earlier turns."""
    for text in (*WORST, *(f"x{token}y" for token in special)):
        if Feature.EMPTY not in features and not text.strip():
            continue
        message = {"role": "user", "content": text}
        yield Conversation(messages=(message,))
        if Feature.HISTORY in features:
            yield Conversation(
                messages=({**message, "content": "x"}, {**message, "role": "assistant"}, {**message, "content": "x"})
            )


def conversations(features: Set[Feature], special: Sequence[str]) -> SearchStrategy[Conversation]:
    """Return a strategy for conversations.

    `special` are texts of special tokens, which users may write.
    """
    return _conversations(frozenset(features), tuple(special))


@st.composite
def _conversations(draw: DrawFn, features: frozenset[Feature], special: tuple[str, ...]) -> Conversation:
    texts = st.text(max_size=8) | st.sampled_from((*WORST, *special, *(f"x{token}y" for token in special)))
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


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template makes of a conversation."""

    text: str
    token_ids: tuple[int, ...]


class Renderer:
    """HF's tokenizer and template.

    Raises:
        HarnessError: NO_CHAT_TEMPLATE: there is none; BAD_TEMPLATE: it takes not even one message of a user.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
        self.tokenizer = tokenizer
        if not tokenizer.hf.chat_template:
            raise HarnessError(
                Code.NO_CHAT_TEMPLATE,
                "the tokenizer has no chat template",
                where=tokenizer.folder,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                hint="a base model has no chats to check",
            )
        self.refusal = ""
        """What the template said when it last refused a conversation."""
        if self.render(Conversation(messages=({"role": "user", "content": "x"},))) is None:
            raise self._bad(f"it refuses one message of a user: {self.refusal}")

    def render(self, conversation: Conversation, *, has_prompt: bool = True) -> Rendered | None:
        """Return text and tokens of a conversation; None if the template refuses it.

        `has_prompt`: whether the beginning of the assistant's answer ends it.

        Raises:
            HarnessError: BAD_TEMPLATE: the template does not end, or makes too much.
        """
        try:
            text = render(self.tokenizer.hf, conversation.messages, conversation.tools, has_prompt=has_prompt)
        except TemplateLimitError as error:
            raise self._bad(str(error)) from None
        except Exception as error:  # a template may raise any exception
            self.refusal = f"{type(error).__name__}: {error}"[:200]
            return None
        return Rendered(text, self.encode(text))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a rendered text, which has its special tokens in it."""
        return tuple(int(token_id) for token_id in self.tokenizer.hf(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Any) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.hf.decode(list(token_ids), skip_special_tokens=False))

    @property
    def special(self) -> Mapping[int, str]:
        """Texts of the special tokens, by id."""
        added = self.tokenizer.hf.added_tokens_decoder
        return {token_id: str(token) for token_id, token in added.items() if token.special}

    def _bad(self, what: str) -> HarnessError:
        return HarnessError(
            Code.BAD_TEMPLATE,
            f"the chat template cannot be used: {what}",
            where=self.tokenizer.folder,
            expected="a template that renders one message of a user",
            hint="look into chat_template.jinja, or chat_template in tokenizer_config.json",
        )


def template_notes(renderer: Renderer) -> Iterator[str]:
    """Yield what a server that follows the template does as well."""
    user = Conversation(messages=({"role": "user", "content": "x"},))
    plain, without = renderer.render(user), renderer.render(user, has_prompt=False)
    assert plain is not None
    bos = renderer.tokenizer.hf.bos_token_id
    if bos is not None and plain.token_ids.count(bos) != 1:
        yield f"HF's own rendering has BOS {plain.token_ids.count(bos)} times"
    if without is not None and without == plain:
        yield "the template has no generation prompt"
    taken = [text for text in renderer.special.values() if _is_taken(renderer, text)]
    if taken:
        yield f"a user who writes {', '.join(map(repr, taken[:4]))} writes the special token, by HF's own rendering"
    for feature in (Feature.HISTORY, Feature.REASONING):
        if _changes_past(renderer, samples()[feature]):
            yield f"a later turn changes how earlier ones are rendered ({feature}): no prefix cache helps there"


def _is_taken(renderer: Renderer, text: str) -> bool:
    plain, with_text = (
        renderer.render(Conversation(messages=({"role": "user", "content": content},))) for content in ("x", f"x{text}")
    )
    if plain is None or with_text is None:
        return False
    return sum(map(renderer.special.__contains__, with_text.token_ids)) > sum(
        map(renderer.special.__contains__, plain.token_ids)
    )


def _changes_past(renderer: Renderer, conversation: Conversation) -> bool:
    """Whether the rendering up to the last turn is no beginning of the whole."""
    before = renderer.render(conversation.changed(*conversation.messages[:-1]), has_prompt=False)
    whole = renderer.render(conversation)
    if before is None or whole is None:
        return False
    return whole.token_ids[: len(before.token_ids)] != before.token_ids
