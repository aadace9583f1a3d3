"""Text and tokens: the `tokenizer.json` of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reference_engine.errors import ConfigError

__all__ = ["Tokenizer"]


class Tokenizer:
    """Turns text into tokens and back.

    Raises:
        ConfigError: the checkpoint's folder has no `tokenizer.json`, or it cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer as Rust  # only those who need text pay for it

        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "tokenizer.json is missing", where=folder, hint="Work with token ids, or save the tokenizer there."
            )
        try:
            self._tokenizer = Rust.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise ConfigError(f"the tokenizer cannot be read: {error}", where=path) from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, special ones included where the checkpoint adds them."""
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of tokens, special ones only where asked for."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special)
        return text
