"""What tokens are called."""

from pathlib import Path

from harness.campaigns.endpoint.names import TokenNames
from harness.formats.checkpoint import Checkpoint

from ..tokens.conftest import write_tokenizer

FOLDER = Path(__file__).parents[4] / "cases" / "checkpoints" / "qwen3-tiny"


def test_tokens_are_spelled_after_the_one_that_begins_a_text():
    names = TokenNames(Checkpoint(FOLDER), vocab_size=256)
    assert names.text_of((20, 30, 40)) is None
    assert names.spelled((20, 30, 40)) == (1, 20, 30, 40)
    assert names.text_of((1, 20, 30, 40)) == "di don fou"
    assert names.spelled((20, 2, 40)) is None, "no text has an end of text in it"


def test_bytes_that_are_no_characters_are_not_told_by_their_text(tmp_path):
    """Servers write U+FFFD for each of them, and seldom the vocabulary's letters for bytes."""
    names = TokenNames(Checkpoint(write_tokenizer(tmp_path)), vocab_size=260)
    letter, half = names.id_of("a"), names.id_of("Ł")
    assert None not in (letter, half)
    assert (names.is_named_alone(letter), names.is_named_alone(half)) == (True, False)
