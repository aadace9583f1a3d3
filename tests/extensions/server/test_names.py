"""What tokens are called."""

from pathlib import Path

from harness.extensions.server.names import TokenNames
from harness.formats.checkpoint import Checkpoint

from .chat.tokens.conftest import write_tokenizer

FOLDER = Path(__file__).parents[3] / "cases" / "checkpoints" / "qwen3-tiny"


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


def test_a_space_that_only_a_text_begins_without_is_part_of_a_name(tmp_path):
    """Servers that keep SentencePiece's spaces name ` and`, others `and`; `l` is two tokens where they are left out."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "a", "l", "▁", "▁l", "▁and", "▁or", "or"]
    tokenizer = Tokenizer(models.WordLevel(vocab={word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    names = TokenNames(Checkpoint(tmp_path), vocab_size=len(words))
    assert (names.id_of("and"), names.id_of(" and"), names.is_named_alone(5)) == (5, 5, True)
    assert (names.id_of("l"), names.id_of(" l"), names.is_named_alone(4)) == (None, 4, False)
    assert (names.id_of(" or"), names.is_named_alone(6), names.is_named_alone(7)) == (6, False, False)
    assert names.id_of("a") == 1
