"""A chat template is a program that comes with a model: what it renders, within limits of time, memory and text."""

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

_MOST_S = 5.0
"""Longest time of one rendering."""
_MOST_CHARACTERS = 4 << 20
_MOST_BYTES = 2 << 30
"""Memory that a template may take."""
_TEMPLATE_FILES = ("<template>", "<unknown>")
"""File names that jinja2 gives to compiled templates."""


class TemplateLimitError(Exception):
    """The template takes more than it may, and says nothing of the conversation."""


class _TooLongError(BaseException):
    """Ends a rendering; not an Exception, which a template's caller may catch."""


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    has_prompt: bool = True,
) -> str:
    """Return the text of a conversation in the chat template of a tokenizer of transformers.

    `has_prompt` says whether the beginning of the assistant's answer ends it.

    Raises:
        TemplateLimitError: the template does not end, or takes too much memory, or writes too much.
        Exception: the template raised it.
    """
    try:
        with _limited():
            text: str = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools or ()] or None,
                add_generation_prompt=has_prompt,
                tokenize=False,
            )
    except _TooLongError:
        raise TemplateLimitError(f"it does not end within {_MOST_S:g} s") from None
    except MemoryError:
        raise TemplateLimitError(f"it takes more than {_MOST_BYTES >> 30} GiB") from None
    if len(text) > _MOST_CHARACTERS:
        raise TemplateLimitError(f"it makes more than {_MOST_CHARACTERS:,} characters of one conversation")
    return text


@contextmanager
def _limited() -> Iterator[None]:
    """Limit the time that a template takes, line by line, and the memory, where the system can."""
    until, before = time.monotonic() + _MOST_S, sys.gettrace()

    def watch(frame: FrameType, event: str, _argument: object) -> Any:
        if time.monotonic() > until:
            raise _TooLongError
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
