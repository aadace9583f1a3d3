"""The tokenizer of a checkpoint, as transformers loads it."""

from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError

_FILES = ("tokenizer.json", "tokenizer_config.json")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a checkpoint has a tokenizer's files."""
    return any((folder / name).exists() for name in _FILES)


def load_tokenizer(folder: Path) -> Any:
    """Return the checkpoint's tokenizer.

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
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise _unusable(folder, error) from error


def encode(text: str, tokenizer: Any, folder: Path) -> list[int]:
    """Return the token ids of a text; `folder` is named where that fails (NO_TOKENIZER)."""
    try:
        return [int(token) for token in tokenizer(text)["input_ids"]]
    except Exception as error:  # likewise
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: Exception) -> HarnessError:
    return HarnessError(
        Code.NO_TOKENIZER, f"the tokenizer cannot be loaded: {error}", where=folder, hint="give --token-ids"
    )
