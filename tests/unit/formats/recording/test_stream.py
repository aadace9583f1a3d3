"""A safetensors file written front to back, whatever its header turns out to be; read back by the library."""

import numpy as np
import pytest
from safetensors.numpy import load

from harness.errors import HarnessError
from harness.formats.recording import writer
from harness.formats.recording.writer import ALIGNMENT, TensorStream, _header_room
from harness.formats.safetensors_header import LENGTH_BYTES


@pytest.mark.parametrize("num_bytes", [0, 1, 55, 56, 57, 119, 120, 121, 1000])
def test_the_least_room_behind_which_data_is_aligned(num_bytes):
    room = _header_room(num_bytes)
    assert (LENGTH_BYTES + room) % ALIGNMENT == 0
    assert num_bytes <= room < num_bytes + ALIGNMENT


def write(path, tensors, reserve_bytes):
    out = TensorStream(path, reserve_bytes=reserve_bytes)
    for name, x in tensors.items():
        assert name not in out
        out.add(name, "F32", x.shape, x.reshape(-1).view(np.uint8).data)
        assert name in out
    return out


TENSORS = {f"tap{at}": np.arange(7 * at, 7 * at + 6, dtype=np.float32).reshape(2, 3) for at in range(5)}


@pytest.mark.parametrize("chunk", [1, 7, 48, 1 << 23])
@pytest.mark.parametrize("reserve_bytes", [0, 100, 5000])
def test_a_header_of_any_size(tmp_path, monkeypatch, reserve_bytes, chunk):
    """One that outgrows its room moves the data, a chunk at a time."""
    monkeypatch.setattr(writer, "_CHUNK_BYTES", chunk)
    path = tmp_path / "file"
    out = write(path, TENSORS, reserve_bytes)
    out.patch("tap3", (TENSORS["tap3"] + 1).reshape(-1).view(np.uint8).data)
    size = out.finish()
    content = path.read_bytes()
    assert size == len(content)
    room = int.from_bytes(content[:LENGTH_BYTES], "little")
    assert (LENGTH_BYTES + room) % ALIGNMENT == 0
    assert size == LENGTH_BYTES + room + 5 * 24
    assert room == _header_room(max(reserve_bytes, len(content[LENGTH_BYTES : LENGTH_BYTES + room].rstrip())))
    found = load(content)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(found[name], x + (name == "tap3"))


def test_a_file_that_is_there_is_not_written_again(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(HarnessError):
        TensorStream(tmp_path / "file", reserve_bytes=0)
    assert (tmp_path / "file").read_text() == "kept"


def test_what_is_abandoned_is_gone_and_closed_once(tmp_path):
    out = write(tmp_path / "file", TENSORS, 0)
    out.close()
    out.close()
    out.abandon()
    assert not (tmp_path / "file").exists()
    out.abandon()
