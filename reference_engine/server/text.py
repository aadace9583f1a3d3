"""Text of a checkpoint: its tokenizer, the text of single tokens, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from reference_engine.errors import ConfigError, RequestError
from reference_engine.requests.tokenizer import Tokenizer, has_tokenizer

__all__ = ["Text"]


class Text:
    """Turns text and messages into tokens and back.

    A checkpoint without a tokenizer serves token ids; what it writes then has no text.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self.token = cache(self._token)
        """The text of one token, special ones included."""

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        return Tokenizer(self._folder) if has_tokenizer(self._folder) else None

    @cached_property
    def _chat_tokenizer(self) -> Any:
        from transformers import AutoTokenizer  # seconds to import, and only chats need it

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ConfigError: there is no tokenizer, or it cannot be read.
        """
        if self._tokenizer is None:
            raise ConfigError("the checkpoint has no tokenizer", where="prompt", hint="Send token ids.")
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones; nothing if there is no tokenizer."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Return the tokens of messages in the checkpoint's chat template, up to where the answer begins.

        The arguments of tool calls may be JSON, as in OpenAI's interface: templates take what it says.

        Raises:
            RequestError: there is no template, or it does not take the messages.
        """
        if self._tokenizer is None or not self._chat_tokenizer.chat_template:
            raise RequestError("the checkpoint has no chat template", where="messages", hint="Use /v1/completions.")
        try:
            ids = self._chat_tokenizer.apply_chat_template(
                [_with_arguments(message) for message in messages],
                tools=tools or None,
                add_generation_prompt=True,
                return_dict=False,
            )
        except Exception as error:  # a template may raise whatever it likes
            raise RequestError(f"the chat template does not take the messages: {error}", where="messages") from error
        return [int(token_id) for token_id in ids]

    def name(self, token_id: int, *, as_ids: bool) -> str:
        """Return what log probabilities call a token."""
        return f"token_id:{token_id}" if as_ids else str(self.token(token_id))

    def _token(self, token_id: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode([token_id], with_special=True)


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in whose tool calls JSON is read."""
    calls = message.get("tool_calls")
    return message if not calls else {**message, "tool_calls": [_read_call(call) for call in calls]}


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    return (
        {**call, "function": {**function, "arguments": json.loads(arguments)}} if isinstance(arguments, str) else call
    )
