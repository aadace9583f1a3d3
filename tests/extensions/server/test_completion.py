"""What is read of an answer."""

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.server.completion import read_answer
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
