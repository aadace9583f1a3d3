"""The header reader: agrees with the format's own library, and refuses what does not add up, with the numbers."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from harness.errors import Code, HarnessError
from harness.formats.safetensors_header import read_header


def f32(begin, count):
    return {"dtype": "F32", "shape": [count], "data_offsets": [begin, begin + 4 * count]}


def content(header, data_bytes=0):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data_bytes)


def refused(path):
    with pytest.raises(HarnessError) as caught:
        read_header(path)
    assert caught.value.code is Code.DAMAGED_SAFETENSORS
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "x.safetensors"


def test_a_file_of_the_library(file):
    tensors = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(()), "c": torch.zeros(0, 4)}
    save_file(tensors, file, metadata={"format": "pt"})
    header = read_header(file)
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == file.stat().st_size
    assert header.data_offset == 8 + header.header_bytes
    entries = {entry.name: (entry.dtype, entry.shape, entry.num_bytes, entry.num_elements) for entry in header.tensors}
    assert entries == {"a": ("BF16", (2, 3), 12, 6), "b": ("F32", (), 4, 1), "c": ("F32", (0, 4), 0, 0)}
    assert [entry.begin for entry in header.tensors] == sorted(entry.begin for entry in header.tensors)


def test_no_tensors_and_padding(file):
    file.write_bytes(content(b"{}   "))
    assert read_header(file).tensors == ()


@pytest.mark.parametrize(("dtype", "shape", "num_bytes"), [("F4", [3, 4], 6), ("F6_E2M3", [4], 3), ("C64", [2], 16)])
def test_dtypes_of_other_widths(file, dtype, shape, num_bytes):
    file.write_bytes(content({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}}, num_bytes))
    assert read_header(file).tensors[0].num_bytes == num_bytes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too short for a header length\n  where:    {file}\n  expected: 8 bytes\n  actual:   0 bytes"),
        (b"1234567", "too short for a header length"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "expected: at most 2 bytes\n  actual:   18446744073709551615 bytes"),
        (content(b""), "does not begin with '{'"),
        (content(b"[]"), "does not begin with '{'"),
        (content(b" {}"), "does not begin with '{'"),
        (content(b"{"), "not valid JSON"),
        (content(b'{"\xff": 1}'), "not valid JSON"),
        (content(b'{"x": NaN}'), "NaN is not JSON"),
        (content(b'{"x": 1' + b"0" * 5000 + b"}"), "not valid JSON"),
        (content(b'{"\\ud800": {}}'), "not valid JSON"),
        (content(b'{"x": ' + b"[" * 100_000), "nested too deeply"),
        (content(b'{"x": 1, "x": 1}'), "appears twice"),
        (content({"__metadata__": {"a": 1}}), "not a table of strings"),
        (content({"__metadata__": []}), "not a table of strings"),
        (content({"x": 1}), "not {dtype, shape, data_offsets}"),
        (content({"x": f32(0, 1) | {"more": 1}}, 4), "not {dtype, shape, data_offsets}"),
        (content({"x": f32(0, 1) | {"dtype": "F33"}}, 4), "dtype is unknown"),
        (content({"x": f32(0, 1) | {"dtype": ["F32"]}}, 4), "dtype is unknown"),
        (content({"x": f32(0, 1) | {"shape": [-1]}}, 4), "not a list of sizes"),
        (content({"x": f32(0, 1) | {"shape": [True]}}, 4), "not a list of sizes"),
        (content({"x": f32(0, 1) | {"shape": [1.0]}}, 4), "not a list of sizes"),
        (content({"x": f32(0, 0) | {"shape": [0, 2**62, 4]}}), "not a list of sizes"),
        (content({"x": f32(0, 1) | {"data_offsets": [0]}}, 4), "not [begin, end]"),
        (content({"x": f32(0, 1) | {"data_offsets": [4, 0]}}, 4), "not [begin, end]"),
        (content({"x": f32(0, 2) | {"shape": [3]}}, 8), "expected: 12 bytes\n  actual:   8 bytes"),
        (content({"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2), "expected: 1.5 bytes"),
        (content({"x": f32(4, 1)}, 8), "has a hole"),
        (content({"x": f32(0, 2), "y": f32(4, 2)}, 12), "overlap"),
        (
            content({"x": f32(0, 2)}, 7),
            "is truncated\n  where:    {file}\n  expected: 8 bytes of data\n  actual:   7 bytes",
        ),
        (content({"x": f32(0, 2)}, 9), "bytes follow the last tensor"),
    ],
)
def test_what_does_not_add_up(file, data, message):
    file.write_bytes(data)
    assert message.replace("{file}", str(file)) in refused(file)


def test_a_header_over_the_limit_is_not_read(file):
    with file.open("wb") as out:
        out.write(struct.pack("<Q", 10**11))
        out.truncate(10**12)  # sparse
    assert "expected: at most 100000000 bytes" in refused(file)


def test_not_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "missing")
    refused(f"{tmp_path}/\0")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_is_accepted_the_library_accepts_too(file, data):
    valid = content({"a": f32(0, 2), "bb": {"dtype": "I8", "shape": [2, 2], "data_offsets": [8, 12]}}, 12)
    mutant = bytearray(valid)
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(mutant) - 1))
        mutant[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2) | st.just(b"1"))
    file.write_bytes(mutant)
    try:
        names = {entry.name for entry in read_header(file).tensors}
    except HarnessError:
        return
    try:
        with safe_open(file, "pt") as opened:
            assert set(opened.keys()) == names
    except SafetensorError as error:
        pytest.fail(f"{bytes(mutant)!r}: {error}")
