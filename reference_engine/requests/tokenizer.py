"""Text and tokens: the `tokenizer.json` of a checkpoint, or its `vocab.json` and `merges.txt`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reference_engine.errors import ConfigError

__all__ = ["Tokenizer", "has_tokenizer"]

_WHOLE, _PARTS = "tokenizer.json", ("vocab.json", "merges.txt")


def has_tokenizer(folder: str | Path) -> bool:
    """Whether the folder of a checkpoint has the files of a tokenizer."""
    return (Path(folder) / _WHOLE).is_file() or all((Path(folder) / part).is_file() for part in _PARTS)


class Tokenizer:
    """Turns text into tokens and back.

    Raises:
        ConfigError: the checkpoint's folder has no tokenizer, or it cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        if not has_tokenizer(folder):
            raise ConfigError(
                "tokenizer.json is missing", where=folder, hint="Work with token ids, or save the tokenizer there."
            )
        try:
            self._tokenizer = _read(Path(folder))
        except Exception as error:  # the libraries raise no narrower type
            raise ConfigError(f"the tokenizer cannot be read: {error}", where=folder) from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, special ones included where the checkpoint adds them."""
        token_ids: list[int] = self._tokenizer.encode(text).ids
        return token_ids

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of tokens, special ones only where asked for."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not with_special)
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the entry of each token in the vocabulary, as this writes it; None where it has none."""
        return [self._tokenizer.id_to_token(token_id) for token_id in token_ids]

    def doubled_begin(self, text: str) -> str | None:
        """Return the token that a text begins with and that this tokenizer adds once more; None if there is none."""
        added, plain = (self._tokenizer.encode(text, add_special_tokens=adds).ids for adds in (True, False))
        is_doubled = len(added) > len(plain) and plain[:1] == added[:1] and added[1 : 1 + len(plain)] == plain
        return self.pieces(added[:1])[0] if is_doubled else None


def _read(folder: Path) -> Any:
    """Return the tokenizer of the library `tokenizers`; transformers builds it of a vocabulary and merges."""
    if (folder / _WHOLE).is_file():
        from tokenizers import Tokenizer as Rust  # only those who need text pay for it

        return Rust.from_file(str(folder / _WHOLE))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).backend_tokenizer
