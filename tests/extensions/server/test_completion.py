"""What is read of an answer."""

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.server.completion import read_answer, read_text_answer
from harness.extensions.server.names import TokenNames
from harness.formats.checkpoint import Checkpoint

from .chat.tokens.conftest import write_tokenizer


def test_an_answer_without_a_text_is_not_the_word_none(tmp_path):
    """A tokenizer of bytes has tokens for that word."""
    names = TokenNames(Checkpoint(write_tokenizer(tmp_path)), vocab_size=260)
    body = {"choices": [{"text": None, "finish_reason": "length"}]}
    with pytest.raises(HarnessError, match="the tokens of an answer cannot be told from its text") as caught:
        read_answer(body, (66, 67), names, where="here")
    assert caught.value.code is Code.ENDPOINT_CANNOT


def test_a_stream_that_leaves_out_half_a_character_has_the_tokens_of_the_whole_answer(tmp_path):
    names = TokenNames(Checkpoint(write_tokenizer(tmp_path)), vocab_size=260)

    def of(text: str, **more: object) -> dict[str, object]:
        return {"choices": [{"text": text, "finish_reason": "length", **more}]}

    first = read_answer(of("a\ufffd", token_ids=[97, 195]), (66, 67), names, where="here")
    of_texts = {
        text: read_text_answer(of(text), (66, 67), names, first, where="here").token_ids == first.token_ids
        for text in ("a\ufffd", "a", "b")
    }
    assert of_texts == {"a\ufffd": True, "a": True, "b": False}
