"""The truth of a chat: HF's template in transformers' sandbox, with limits of time and size."""

import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.server.chat.tokens.conversations import Conversation
from harness.formats.checkpoint import HFTokenizer

_MOST_S = 5.0
"""Longest time of one rendering."""
_MOST_CHARACTERS = 4 << 20
_MOST_BYTES = 2 << 30
"""Memory that a template may take."""
_TEMPLATE_FILES = ("<template>", "<unknown>")
"""File names that jinja2 gives to compiled templates."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a template makes of a conversation."""

    text: str
    token_ids: tuple[int, ...]


class _TooLongError(BaseException):
    """Ends a rendering; not an Exception, which a template's caller may catch."""


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
            with _limited():
                text = self.tokenizer.hf.apply_chat_template(
                    [dict(message) for message in conversation.messages],
                    tools=[dict(tool) for tool in conversation.tools] or None,
                    add_generation_prompt=has_prompt,
                    tokenize=False,
                )
        except _TooLongError as error:
            raise self._bad(str(error)) from None
        except MemoryError:
            raise self._bad(f"it takes more than {_MOST_BYTES >> 30} GiB") from None
        except Exception as error:  # a template may raise whatever it likes
            self.refusal = f"{type(error).__name__}: {error}"[:200]
            return None
        if len(text) > _MOST_CHARACTERS:
            raise self._bad(f"it makes more than {_MOST_CHARACTERS:,} characters of one conversation")
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


@contextmanager
def _limited() -> Iterator[None]:
    """Limit the time that a template takes, line by line, and the memory, where the system can."""
    until, before = time.monotonic() + _MOST_S, sys.gettrace()

    def watch(frame: FrameType, event: str, _argument: object) -> Any:
        if time.monotonic() > until:
            raise _TooLongError(f"it does not end within {_MOST_S:g} s")
        return watch if event != "call" or frame.f_code.co_filename in _TEMPLATE_FILES else None

    with _limited_memory():
        sys.settrace(watch)
        try:
            yield
        finally:
            sys.settrace(before)


@contextmanager
def _limited_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123  # no file that a user named
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MOST_BYTES, before[1]))
    except (OSError, ValueError):  # no Linux, or a limit that is lower already
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
