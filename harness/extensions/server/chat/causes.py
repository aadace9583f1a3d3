"""Names of differences: the mistake that turns HF's rendering into what the server saw.

A mistake that changes every conversation in a known way is named only if no conversation speaks against it.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from harness.extensions.server.chat.conversations import Conversation, Rendered, Renderer, Seen, with_arguments

_DATE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2} (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]* \d{4}"
    r"|(?:January|February|March|April|May|June|July|August|September|October|November|December) \d{1,2},? \d{4}"
)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_CONTEXT = 30
"""Characters beside a difference that are shown."""

Change = Callable[[Conversation], Conversation]
Render = Callable[[Conversation, Rendered, Renderer], Rendered | None]
"""Takes a conversation and HF's rendering, and returns what a mistake makes of it; None: the mistake is impossible."""
Shows = Callable[[Seen, Rendered, Renderer], bool]
"""Whether a mistake shows in what a server saw of a conversation, and HF's rendering."""


def is_same(seen: Seen, rendered: Rendered) -> bool:
    """Whether the server saw a rendering, as far as its answer shows."""
    if seen.token_ids is not None:
        return seen.token_ids == rendered.token_ids
    if seen.text is not None:
        return seen.text == rendered.text
    return seen.count == len(rendered.token_ids)


@dataclass(frozen=True, slots=True)
class Cause:
    """A mistake: what it makes of any conversation, or how it shows in what was seen of one."""

    name: str
    render: Render | None = None
    shows: Shows | None = None

    def explains(self, conversation: Conversation, seen: Seen, expected: Rendered, renderer: Renderer) -> bool | None:
        """Return whether this mistake makes of a conversation what the server saw; None: it is not known."""
        if self.shows is not None:
            return self.shows(seen, expected, renderer)
        assert self.render is not None
        rendered = self.render(conversation, expected, renderer)
        return None if rendered is None else seen.refusal is None and is_same(seen, rendered)

    @property
    def is_general(self) -> bool:
        """Whether the mistake changes every conversation in a known way, so that a sound conversation refutes it."""
        return self.render is not None


def _changed(change: Change) -> Render:
    def render(conversation: Conversation, expected: Rendered, renderer: Renderer) -> Rendered | None:
        try:
            changed = change(conversation)
        except UnicodeError:
            return None
        if changed == conversation:
            return expected
        return renderer.render(changed) if changed.messages else None

    return render


def _with_bos(_: Conversation, expected: Rendered, renderer: Renderer) -> Rendered | None:
    bos = renderer.tokenizer.hf.bos_token_id
    return None if bos is None else Rendered(expected.text, (bos, *expected.token_ids))


def _without_bos(_: Conversation, expected: Rendered, renderer: Renderer) -> Rendered | None:
    has_bos = expected.token_ids[:1] == (renderer.tokenizer.hf.bos_token_id,)
    return Rendered(expected.text, expected.token_ids[1:]) if has_bos else None


def _with_eos(_: Conversation, expected: Rendered, renderer: Renderer) -> Rendered | None:
    eos = renderer.tokenizer.hf.eos_token_id
    return None if eos is None else Rendered(expected.text, (*expected.token_ids, eos))


def _texts(seen: Seen, expected: Rendered, renderer: Renderer) -> tuple[str, str] | None:
    """Return HF's text and the text that was seen, if it is known."""
    if seen.token_ids is not None:
        return renderer.decode(expected.token_ids), renderer.decode(seen.token_ids)
    return None if seen.text is None else (expected.text, seen.text)


def _by_text(is_so: Callable[[str, str], bool]) -> Shows:
    def shows(seen: Seen, expected: Rendered, renderer: Renderer) -> bool:
        texts = _texts(seen, expected, renderer)
        return texts is not None and texts[0] != texts[1] and is_so(*texts)

    return shows


def _ends(whole: Sequence[object], part: Sequence[object]) -> bool:
    return whole[max(0, len(whole) - len(part)) :] == part


def _by_parts(is_so: Callable[[Sequence[object], Sequence[object]], bool]) -> Shows:
    """Return what compares all tokens, or texts where no tokens are known; neither is empty."""

    def shows(seen: Seen, expected: Rendered, renderer: Renderer) -> bool:
        known: Sequence[object] | None = seen.text if seen.token_ids is None else seen.token_ids
        rendered: Sequence[object] = expected.text if seen.token_ids is None else expected.token_ids
        return bool(known) and known is not None and is_so(rendered, known)

    return shows


def _by_tokens(is_so: Callable[[int, bool], bool]) -> Shows:
    """Return what sees the same text in other tokens: by how many more are special, and whether any is a byte."""

    def shows(seen: Seen, expected: Rendered, renderer: Renderer) -> bool:
        texts = _texts(seen, expected, renderer)
        if seen.token_ids is None or texts is None or texts[0] != texts[1]:
            return False
        num_seen, num_expected = (
            sum(token_id in renderer.special for token_id in ids) for ids in (seen.token_ids, expected.token_ids)
        )
        names = renderer.tokenizer.hf.convert_ids_to_tokens(list(seen.token_ids))
        return is_so(num_seen - num_expected, any(_BYTE.fullmatch(str(name)) for name in names))

    return shows


def _contents(change: Callable[[str], str], *roles: str) -> Change:
    """Return what changes the contents of messages, of some roles if any are named."""

    def with_changed_content(message: Mapping[str, Any]) -> Mapping[str, Any]:
        is_changed = not roles or message["role"] in roles
        return {**message, "content": change(message["content"])} if is_changed else message

    return _fields(with_changed_content)


def _fields(change: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]) -> Change:
    """Return what changes or drops messages."""

    def changed(conversation: Conversation) -> Conversation:
        messages = [change(message) for message in conversation.messages]
        return conversation.changed(*(message for message in messages if message is not None))

    return changed


def _without(name: str) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    return lambda message: {key: value for key, value in message.items() if key != name}


def _merged_system(conversation: Conversation) -> Conversation:
    first, *rest = conversation.messages
    if first["role"] != "system" or not rest:
        return conversation
    return conversation.changed({**rest[0], "content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:])


def _text_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": [with_arguments(call, json.dumps) for call in calls]}


def _without_thinking(text: str) -> str:
    return text.rpartition("</think>")[2]


def _inlined_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "reasoning_content" not in message:
        return message
    inlined = f"<think>\n{message['reasoning_content']}\n</think>\n\n{message['content']}"
    return {**_without("reasoning_content")(message), "content": inlined}


_CHANGES: dict[str, Change] = {
    "tools dropped": lambda conversation: replace(conversation, tools=()),
    "system message dropped": _fields(lambda message: None if message["role"] == "system" else message),
    "system message put into the user's": _merged_system,
    "whitespace stripped": _contents(str.strip),
    "whitespace stripped at the beginning": _contents(str.lstrip),
    "whitespace stripped at the end": _contents(str.rstrip),
    "whitespace of the user stripped": _contents(str.strip, "user"),
    "whitespace of the system message stripped": _contents(str.strip, "system"),
    "whitespace of the assistant stripped": _contents(str.strip, "assistant"),
    "whitespace of tool results stripped": _contents(str.strip, "tool"),
    "whitespace run together": _contents(lambda text: re.sub(r"\s+", " ", text)),
    "line ends changed": _contents(lambda text: text.replace("\r\n", "\n")),
    "line ends and carriage returns changed": _contents(lambda text: text.replace("\r\n", "\n").replace("\r", "\n")),
    "reasoning removed from history": _fields(_without("reasoning_content")),
    "reasoning put into the content": _fields(_inlined_reasoning),
    "thinking cut out of the content": _contents(_without_thinking),
    "thinking of the assistant cut out of the content": _contents(_without_thinking, "assistant"),
    "thinking and the line ends after it cut out": _contents(lambda text: _without_thinking(text).lstrip("\n")),
    "tool calls dropped": _fields(_without("tool_calls")),
    "tool results dropped": _fields(lambda message: None if message["role"] == "tool" else message),
    "tool results taken for the user's": _fields(
        lambda message: {**message, "role": "user"} if message["role"] == "tool" else message
    ),
    "arguments of tool calls as text": _fields(_text_arguments),
    "empty messages dropped": _fields(
        lambda message: message if message["content"].strip() or "tool_calls" in message else None
    ),
    "earlier turns dropped": lambda conversation: conversation.changed(conversation.messages[-1]),
    "the first message dropped": lambda conversation: conversation.changed(*conversation.messages[1:]),
    "normalisation to NFC": _contents(lambda text: unicodedata.normalize("NFC", text)),
    "normalisation to NFD": _contents(lambda text: unicodedata.normalize("NFD", text)),
    "normalisation to NFKC": _contents(lambda text: unicodedata.normalize("NFKC", text)),
    "control characters dropped": _contents(
        lambda text: "".join(item for item in text if unicodedata.category(item) not in ("Cc", "Cf") or item in "\n\t")
    ),
    "characters outside of ASCII dropped": _contents(lambda text: text.encode("ascii", "ignore").decode()),
    "characters outside of ASCII replaced": _contents(lambda text: text.encode("ascii", "replace").decode()),
    "text in lower case": _contents(str.lower),
    "long text cut": _contents(lambda text: text[:256]),
    "the text taken for a template": _contents(lambda text: text.replace("{{ 7 * 7 }}", "49")),
}


def _date_inserted(expected: str, text: str) -> bool:
    blocks = SequenceMatcher(None, expected, text, autojunk=False).get_opcodes() if len(text) < 20_000 else []
    changed = [text[first:last] for kind, _, _, first, last in blocks if kind != "equal"]
    return bool(changed) and bool(_DATE.search(text)) and not _DATE.search(expected)


CAUSES = (
    Cause("the conversation is refused", shows=lambda seen, _expected, _renderer: seen.refusal is not None),
    Cause("BOS twice", render=_with_bos),
    Cause("no BOS", render=_without_bos),
    Cause("EOS at the end", render=_with_eos),
    Cause(
        "no generation prompt",
        render=lambda conversation, _expected, renderer: renderer.render(conversation, has_prompt=False),
    ),
    *(Cause(name, render=_changed(change)) for name, change in _CHANGES.items()),
    Cause("special tokens in the text taken for text", shows=_by_tokens(lambda more, _: more < 0)),
    Cause("text taken for special tokens", shows=_by_tokens(lambda more, _: more > 0)),
    Cause("byte fallback", shows=_by_tokens(lambda more, is_byte: more == 0 and is_byte)),
    Cause("the same text in other tokens", shows=_by_tokens(lambda more, is_byte: more == 0 and not is_byte)),
    Cause("another date", shows=_by_text(lambda expected, text: _DATE.sub("", expected) == _DATE.sub("", text))),
    Cause("a date is inserted", shows=_by_text(_date_inserted)),
    Cause("something is put before the conversation", shows=_by_parts(lambda expected, seen: _ends(seen, expected))),
    Cause(
        "something is put after the conversation",
        shows=_by_parts(lambda expected, seen: seen[: len(expected)] == expected),
    ),
    Cause("the beginning is cut off", shows=_by_parts(lambda expected, seen: _ends(expected, seen))),
    Cause("the end is cut off", shows=_by_parts(lambda expected, seen: expected[: len(seen)] == seen)),
)
"""All mistakes that have a name."""
UNKNOWN = "other tokens, for no reason that is known"


def show_difference(seen: Seen, expected: Rendered, renderer: Renderer) -> tuple[str, str]:
    """Return what was expected and seen around the first difference."""
    if seen.refusal is not None:
        return "an answer", seen.refusal
    if seen.token_ids is None and seen.text is None:
        return f"{len(expected.token_ids)} tokens", f"{seen.count} tokens"
    text = renderer.decode(seen.token_ids) if seen.token_ids is not None else str(seen.text)
    expected_text = renderer.decode(expected.token_ids) if seen.token_ids is not None else expected.text
    if text == expected_text:
        assert seen.token_ids is not None
        return repr(list(expected.token_ids))[:200], repr(list(seen.token_ids))[:200]
    return around_difference(expected_text, text)


def around_difference(expected: str, text: str) -> tuple[str, str]:
    """Return what was expected and seen around the first character that differs."""
    at = next(
        (at for at, pair in enumerate(zip(expected, text, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(text)),
    )
    begin = max(0, at - _CONTEXT)
    return tuple(f"{'...' if begin else ''}{item[begin : at + _CONTEXT]!r}" for item in (expected, text))  # type: ignore[return-value]
