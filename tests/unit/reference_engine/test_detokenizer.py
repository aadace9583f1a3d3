"""Pieces of text: whole characters only, and together the text."""

from hypothesis import given
from hypothesis import strategies as st

from reference_engine.requests.detokenizer import Detokenizer


def decode_bytes(token_ids):
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


def decode_words(token_ids):
    """A tokenizer that writes no space in front of the first word."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


def pieces(decode, token_ids):
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def test_a_character_comes_with_its_last_byte():
    assert pieces(decode_bytes, "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


def test_half_a_character_at_the_end_is_written_when_nothing_follows():
    assert pieces(decode_bytes, "a€".encode()[:-1]) == ["a", "", "", "�"]


@given(st.text())
def test_bytes_add_up_to_the_text(text):
    assert "".join(pieces(decode_bytes, text.encode())) == text


@given(st.lists(st.integers(0, 255)))
def test_bytes_that_are_no_text_add_up_to_what_the_decoder_makes_of_them_where_it_is_whole(token_ids):
    whole = decode_bytes(token_ids)
    joined = "".join(pieces(decode_bytes, token_ids))
    assert joined.replace("�", "") == whole.replace("�", "")


@given(st.lists(st.integers(0, 9)))
def test_spaces_between_words_are_kept(token_ids):
    assert "".join(pieces(decode_words, token_ids)) == decode_words(token_ids)
