"""GGUF files by hand, so that they can be wrong: the layout of ggml's docs/gguf.md, without any library."""

import struct
from typing import Any

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value_of(value: Any) -> bytes:
    """A metadata value with its type before it."""
    if isinstance(value, bytes):  # as it is
        return value
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))
    return struct.pack("<II", U32, value)


def gguf_bytes(
    metadata: dict[str, Any],
    tensors: list[tuple[str, list[int], int, int]],
    data: bytes,
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
) -> bytes:
    """A file; tensors are (name, shape with rows first, number of the type, offset)."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(metadata) if num_entries is None else num_entries,
    )
    head = b"GGUF" + struct.pack("<IQQ", version, *counts)
    head += b"".join(text(key) + value_of(value) for key, value in metadata.items())
    for name, shape, kind, offset in tensors:
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
    return head + b"\0" * (-len(head) % 32) + data
