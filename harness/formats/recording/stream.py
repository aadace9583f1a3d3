"""A safetensors file written front to back, while its tensors are still being produced.

The format puts a JSON header with every tensor's place before the first tensor. `TensorStream` reserves room for it,
streams the tensors after it, and writes the header last, padded with spaces as the format allows. Only where the header
outgrows its room is the data moved.
"""

import json
import os
import struct
from contextlib import suppress
from pathlib import Path

from harness.base.files import writing
from harness.errors import HarnessError
from harness.formats.safetensors_header import LENGTH_BYTES

ALIGNMENT = 64
"""The data section begins at a multiple of this many bytes."""
_CHUNK_BYTES = 1 << 23


class TensorStream:
    """One safetensors file under construction. Every method raises CANNOT_WRITE where the system refuses to write."""

    def __init__(self, path: Path, *, reserve_bytes: int) -> None:
        """Create the file and reserve `reserve_bytes` for its header."""
        self.path = path
        self._entries: dict[str, dict[str, object]] = {}
        self._begins: dict[str, int] = {}
        self._room = _header_room(reserve_bytes)
        self._end = 0
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append the tensor `name`, whose bytes are `data`."""
        begin, end = self._end, self._end + len(data)
        self._write(data, begin)
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        self._begins[name], self._end = begin, end

    def patch(self, name: str, data: memoryview) -> None:
        """Write the bytes of a tensor again, whose size stays as it is."""
        self._write(data, self._begins[name])

    def finish(self) -> int:
        """Write the header, close the file and return its size in bytes."""
        text = json.dumps(self._entries, separators=(",", ":"), ensure_ascii=False).encode()
        room = max(self._room, _header_room(len(text)))
        with writing(self.path):
            self._move_data(room - self._room)
            head = struct.pack("<Q", room) + text.ljust(room)
            _write_all(self._fd, memoryview(head), 0)
        self.close()
        return LENGTH_BYTES + room + self._end

    def close(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with writing(self.path):
                os.close(fd)

    def abandon(self) -> None:
        """Close the file and remove it."""
        with suppress(HarnessError):
            self.close()
        with suppress(OSError):
            self.path.unlink()

    def _write(self, data: memoryview, begin: int) -> None:
        with writing(self.path):
            _write_all(self._fd, data, LENGTH_BYTES + self._room + begin)

    def _move_data(self, by: int) -> None:
        """Move the data `by` bytes towards the end of the file, its last bytes first."""
        stop = self._end if by else 0
        head = LENGTH_BYTES + self._room
        while stop > 0:
            start = max(0, stop - _CHUNK_BYTES)
            chunk = os.pread(self._fd, stop - start, head + start)
            _write_all(self._fd, memoryview(chunk), head + by + start)
            stop = start
        self._room += by


def _header_room(num_bytes: int) -> int:
    """Return the smallest header length of at least `num_bytes` after which the data is aligned."""
    return -(-(LENGTH_BYTES + num_bytes) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
