"""Text as it comes, token by token.

A character may take several tokens, and a tokenizer may write a token differently at the start of a text than after
others. So a token is decoded together with those before it, and what ends in half a character is held back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer"]

# What a decoder makes of bytes that are no character (yet).
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Turns one continuation into pieces of text; joined, they are what `decode` makes of all its tokens.

    With `context`, the last tokens of the prompt, they are what `decode` adds to the text of those.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._token_ids = list(context)
        # Tokens from `_start` to `_end` give the context in which those from `_end` on are written.
        self._start, self._end = 0, len(self._token_ids)

    def add(self, token_id: int) -> str:
        """Return the text that this token completes: none, while a character is not whole."""
        self._token_ids.append(token_id)
        text = self._pending()
        return "" if text.endswith(REPLACEMENT) else self._emit(text)

    def finish(self) -> str:
        """Return what was held back, as the decoder writes incomplete characters."""
        return self._emit(self._pending())

    def _pending(self) -> str:
        known = self._decode(self._token_ids[self._start : self._end])
        return self._decode(self._token_ids[self._start :])[len(known) :]

    def _emit(self, text: str) -> str:
        if text:
            self._start, self._end = self._end, len(self._token_ids)
        return text
