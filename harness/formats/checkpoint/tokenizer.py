"""The tokenizer of a checkpoint, as transformers loads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.template import render

_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, slots=True)
class HFTokenizer:
    """A tokenizer of transformers, and where it comes from."""

    hf: Any
    """The `PreTrainedTokenizerBase`."""
    folder: Path

    @classmethod
    def load(cls, folder: Path) -> "HFTokenizer":
        """Load the tokenizer of a checkpoint's folder.

        Raises:
            HarnessError: NO_TOKENIZER.
        """
        if not has_tokenizer(folder):
            raise HarnessError(
                Code.NO_TOKENIZER,
                "the checkpoint has no tokenizer",
                where=folder,
                expected="tokenizer.json",
                hint="give the prompt as --token-ids 1,2,3",
            )
        from transformers import AutoTokenizer

        try:
            hf = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise _unusable(folder, error) from error
        return cls(hf, folder)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; raises HarnessError (NO_TOKENIZER) where the tokenizer fails."""
        try:
            return [int(token) for token in self.hf(text)["input_ids"]]
        except Exception as error:  # tokenizers raises bare Exceptions
            raise _unusable(self.folder, error) from error

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Return the token ids of a conversation in the chat template, up to where the assistant's answer begins.

        Messages are as transformers takes them: `role`, `content` and what the template knows besides. `tools` are JSON
        schemas of functions that the assistant may call.

        Raises:
            HarnessError: NO_CHAT_TEMPLATE: there is none, or it does not take these messages, or takes too long for it.
        """
        if not self.hf.chat_template:
            raise HarnessError(
                Code.NO_CHAT_TEMPLATE,
                "the tokenizer has no chat template",
                where=self.folder,
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                hint="give the prompt as text: a base model continues plain text",
            )
        try:
            token_ids = self.hf(render(self.hf, messages, tools), add_special_tokens=False)["input_ids"]
            return [int(token) for token in token_ids]
        except Exception as error:  # a template may raise anything
            raise HarnessError(
                Code.NO_CHAT_TEMPLATE,
                f"the chat template cannot be applied: {error}",
                where=self.folder,
                expected="a template that takes these messages",
            ) from error


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint has a tokenizer's files."""
    return any((folder / name).exists() for name in _FILES)


def _unusable(folder: Path, error: Exception) -> HarnessError:
    what = f"the tokenizer cannot be loaded: {error}"
    return HarnessError(Code.NO_TOKENIZER, what, where=folder, hint="give --token-ids")
