"""Headers of GGUF files: what is in a sound one, and that nothing in a damaged one is believed."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf import open_gguf, read_gguf_header

from .bytes_of import ARRAY, STRING, U32, gguf_bytes, text

METADATA = {"general.architecture": "llama", "llama.block_count": 2, "llama.eps": 0.5, "tokens": ["a", "bc"]}
TENSORS = [("a", [2, 3], 0, 0), ("b", [4, 64], 8, 32)]
DATA = bytes(range(24)) + bytes(8) + bytes(4 * 2 * 34)
SOUND = gguf_bytes(METADATA, TENSORS, DATA)


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return read_gguf_header(path)

    return read


@pytest.fixture
def refused(read):
    def refused(content, code=Code.DAMAGED_GGUF):
        with pytest.raises(HarnessError) as caught:
            read(content)
        assert caught.value.code is code
        return str(caught.value)

    return refused


def test_a_sound_file(read):
    header = read(SOUND)
    assert header.version == 3
    assert header.metadata == METADATA
    first, second = header.tensors
    assert (first.name, first.shape, first.type.name, first.num_bytes) == ("a", (2, 3), "F32", 24)
    assert (second.name, second.shape, second.type.name) == ("b", (4, 64), "Q8_0")
    assert second.begin == header.data_offset + 32
    assert second.end == header.file_bytes
    assert second.type.bits_per_weight == 8.5


def test_a_file_that_ends_anywhere_before_its_end_is_refused(refused):
    for length in range(0, len(SOUND)):
        refused(SOUND[:length])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"GGML" + SOUND[4:], "does not begin with GGUF"),
        (gguf_bytes(METADATA, TENSORS, DATA, num_tensors=2**60), "more tensors than the file has room for"),
        (gguf_bytes(METADATA, TENSORS, DATA, num_entries=2**60), "more metadata entries than the file has room for"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, U32, 2**61)}, [], b""), "more values of k than the file has"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, STRING, 2**50)}, [], b""), "more values of k than the file has"),
        (gguf_bytes({"k": struct.pack("<IIQ", ARRAY, ARRAY, 1)}, [], b""), "an array holds arrays"),
        (gguf_bytes({"k": struct.pack("<IQ", STRING, 2**63)}, [], b""), "longer than the file"),
        (gguf_bytes({"k": struct.pack("<I", 99)}, [], b""), "the type of a value is unknown"),
        (gguf_bytes({"k": struct.pack("<IQ", STRING, 2) + b"\xff\xfe"}, [], b""), "no UTF-8"),
        (gguf_bytes({"general.alignment": 7}, [], b""), "the alignment is impossible"),
        (gguf_bytes({"general.alignment": "x"}, [], b""), "the alignment is impossible"),
        (gguf_bytes({}, [("a", [2**40, 2**40], 0, 0)], b""), "the shape is impossible"),
        (gguf_bytes({}, [("a", [0, 3], 0, 0)], b""), "the shape is impossible"),
        (gguf_bytes({}, [("a", [2, 3, 1, 1, 1], 0, 0)], DATA), "the number of dimensions is impossible"),
        (gguf_bytes({}, [("a", [2, 3], 0, 8)], DATA), "not aligned"),
        (gguf_bytes({}, [("a", [2, 33], 8, 0)], DATA), "no whole number of blocks"),
        (gguf_bytes({}, [("a", [64], 0, 0), ("b", [64], 0, 32)], bytes(512)), "two tensors overlap"),
        (gguf_bytes({}, [("a", [2], 0, 0), ("a", [2], 0, 32)], bytes(512)), "two tensors have the same name"),
        (gguf_bytes({}, [("a", [2**20], 0, 0)], bytes(64)), "the file is truncated"),
        (SOUND[:20], "inside its header"),
    ],
)
def test_what_does_not_fit_is_refused(refused, content, said):
    assert said in refused(content)


def test_a_key_that_appears_twice(refused):
    twice = gguf_bytes({"k": 1, "l": 2}, [], b"").replace(text("l"), text("k"))
    assert "a key appears twice" in refused(twice)


def test_other_versions_and_types(refused):
    assert "version 2 or 3" in refused(gguf_bytes({}, [], b"", version=1), Code.UNSUPPORTED_GGUF)
    assert "big-endian" in refused(gguf_bytes({}, [], b"", version=3 << 24), Code.UNSUPPORTED_GGUF)
    assert "type 77" in refused(gguf_bytes({}, [("a", [2], 77, 0)], bytes(64)), Code.UNSUPPORTED_GGUF)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SOUND) - len(DATA) - 1), st.integers(0, 255))
def test_whatever_one_byte_is_the_header_is_read_or_refused(tmp_path_factory, at, value):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    path.write_bytes(SOUND[:at] + bytes([value]) + SOUND[at + 1 :])
    try:
        read_gguf_header(path)
    except HarnessError as error:
        assert error.code in (Code.DAMAGED_GGUF, Code.UNSUPPORTED_GGUF)  # noqa: PT017


def test_a_folder_and_a_missing_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(HarnessError, match="H100"):
            read_gguf_header(path)


def test_a_missing_shard_is_named(tmp_path):
    path = tmp_path / "model-00002-of-00003.gguf"
    path.write_bytes(SOUND)
    with pytest.raises(HarnessError, match=r"the shard model-00001-of-00003\.gguf is missing") as caught:
        open_gguf(path)
    assert caught.value.code is Code.MISSING_SHARD


def test_two_shards_with_the_same_tensor(tmp_path):
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.gguf").write_bytes(SOUND)
    with pytest.raises(HarnessError, match="two files hold the same tensor"):
        open_gguf(tmp_path / "model-00001-of-00002.gguf")
