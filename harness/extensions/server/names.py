"""Tokens by their text, for servers that name no ids: a text counts only if it becomes the same tokens again."""

from collections.abc import Sequence
from functools import cached_property

from harness.formats.checkpoint import Checkpoint

_ID_PREFIXES = ("token_id:", "token:")
"""Prefixes that vLLM and others write before an id when they are asked to name tokens by it."""
_MOST_DIGITS = 20
"""Digits of an id that are read: no vocabulary has an id of so many."""


class TokenNames:
    """The tokens of the model's checkpoint by the names that servers give them."""

    def __init__(self, checkpoint: Checkpoint, *, vocab_size: int) -> None:
        self._checkpoint, self._vocab_size = checkpoint, vocab_size

    def has(self, token_id: object) -> bool:
        """Whether a value that a server gives is the id of a token of the model."""
        return isinstance(token_id, int) and not isinstance(token_id, bool) and 0 <= token_id < self._vocab_size

    @property
    def is_there(self) -> bool:
        """Whether the checkpoint has a tokenizer."""
        return self._checkpoint.has_tokenizer

    @cached_property
    def _texts(self) -> list[tuple[str, str]]:
        """Text of each token alone, and within a text: SentencePiece leaves out the space that a text begins with."""
        tokenizer = self._checkpoint.tokenizer.hf
        alone = tokenizer.batch_decode([[item] for item in range(len(tokenizer))])
        before = next((at for at, text in enumerate(alone) if text.isascii() and text.isalpha()), None)
        if before is None:
            return [(text, text) for text in alone]
        pairs = tokenizer.batch_decode([[before, item] for item in range(len(tokenizer))])
        start = alone[before]
        return [
            (text, pair.removeprefix(start) if pair.startswith(start) else text)
            for text, pair in zip(alone, pairs, strict=True)
        ]

    @cached_property
    def _by_text(self) -> dict[str, int | None]:
        """Ids by text; None if several tokens have it."""
        by_text: dict[str, int | None] = {}
        for token_id, texts in enumerate(self._texts):
            for text in set(texts):
                by_text[text] = None if text in by_text else token_id
        return by_text

    @cached_property
    def _ids(self) -> dict[str, int | None]:
        """The same, and by the vocabulary's names where no text is the same."""
        return {**self._checkpoint.tokenizer.hf.get_vocab(), **self._by_text}

    def id_of(self, name: str) -> int | None:
        """Return the id of a token that a server names; None if it cannot be told."""
        for prefix in _ID_PREFIXES:
            if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
                return int(name.removeprefix(prefix)[:_MOST_DIGITS])
        return self._ids.get(name) if self.is_there else None

    def is_named_alone(self, token_id: int) -> bool:
        """Whether the text of a token tells its id."""
        return self.is_there and token_id in self._told

    @cached_property
    def _told(self) -> frozenset[int]:
        """Tokens that are told by their text, as a server writes it alone or within a text."""
        told = (at for at, texts in enumerate(self._texts) if all(self._by_text[text] == at for text in texts))
        return frozenset(told)

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """Return the text that becomes exactly these tokens; None if no text does."""
        for skip in (True, False):  # most tokenizers put their special tokens before a text themselves
            text: str = self._checkpoint.tokenizer.hf.decode(list(token_ids), skip_special_tokens=skip)
            if self.encode(text) == list(token_ids):
                return text
        return None

    def decode(self, token_ids: Sequence[int], *, with_special: bool = False) -> str:
        """Return the text of tokens, without special ones by default."""
        return str(self._checkpoint.tokenizer.hf.decode(list(token_ids), skip_special_tokens=not with_special))

    def spelled(self, token_ids: Sequence[int]) -> tuple[int, ...] | None:
        """Return what the text of some tokens becomes: the same, after those that the tokenizer begins a text with.

        None if no text ends in these tokens.
        """
        respelled = tuple(self.encode(self.decode(token_ids)))
        is_same = respelled[-len(token_ids) :] == tuple(token_ids)
        return respelled if is_same and self.text_of(respelled) is not None else None

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._checkpoint.tokenizer.encode(text)

    def continuation(self, prompt: Sequence[int], text: str, num_tokens: int | None) -> tuple[int, ...] | None:
        """Return the tokens of a continuation's text if the prompt and `num_tokens` agree with them."""
        before = self.text_of(prompt) if self.is_there else None
        if before is None:
            return None
        token_ids = self.encode(before + text)
        new = token_ids[len(prompt) :]
        is_sure = token_ids[: len(prompt)] == list(prompt) and num_tokens in (None, len(new))
        return tuple(new) if is_sure else None
