"""Tokens by their text: what servers that name no ids make necessary, with a check that nothing is lost on the way."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError

_ID_PREFIXES = ("token_id:", "token:")
"""Prefixes that vLLM and others write before an id when they are asked to name tokens by it."""


class TokenNames:
    """The tokenizer of the model's checkpoint, as far as a server is understood by it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint has a tokenizer."""
        return any((self._folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))

    @cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exceptions
            what = f"the server takes or gives text, and the tokenizer cannot be loaded: {error}"
            raise HarnessError(Code.NO_TOKENIZER, what, where=self._folder) from error

    @cached_property
    def _ids(self) -> dict[str, int | None]:
        """Ids by text; None if several tokens have it."""
        ids = range(len(self._tokenizer))
        found: dict[str, int | None] = {}
        for token_id, text in zip(ids, self._tokenizer.batch_decode([[each] for each in ids]), strict=True):
            found[text] = None if text in found else token_id
        for piece, token_id in self._tokenizer.get_vocab().items():
            found.setdefault(piece, token_id)
        return found

    def id_of(self, name: str) -> int | None:
        """Return the id of a token that a server names; None if it cannot be told."""
        for prefix in _ID_PREFIXES:
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                return int(name.removeprefix(prefix))
        return self._ids.get(name) if self.is_there else None

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """Return the text that becomes exactly these tokens; None if no text does."""
        for skip in (True, False):  # most tokenizers put their special tokens before a text themselves
            text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip)
            if self.encode(text) == list(token_ids):
                return text
        return None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return [int(token_id) for token_id in self._tokenizer(text)["input_ids"]]

    def continuation(self, prompt: Sequence[int], text: str, num_tokens: int | None) -> tuple[int, ...] | None:
        """Return the tokens of a continuation's text, if they can be told: so many, behind the prompt's."""
        before = self.text_of(prompt) if self.is_there else None
        if before is None:
            return None
        token_ids = self.encode(before + text)
        new = token_ids[len(prompt) :]
        is_sure = token_ids[: len(prompt)] == list(prompt) and num_tokens in (None, len(new))
        return tuple(new) if is_sure else None
