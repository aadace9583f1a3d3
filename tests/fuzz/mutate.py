"""Seeded damage: to bytes, to the values of JSON, and to the header of a safetensors file."""

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Mutation = Callable[[bytes, Random], bytes]

_SNIPPETS = [
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"=", b"\n", b"0", b"1", b"9" * 30, b"9" * 5000, b"null", b"true",
    b"NaN", b"1e400", b"\0", b"\xff", b"\\ud800", b"../", b"/dev/zero", b"\x1b[2J", b"[" * 3000, b" " * 64,
    b"0x" + b"f" * 5000,
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, float("inf"), float("nan"), "",
    " ", "0", "x" * 5000, "../../etc/passwd", "/dev/zero", "\x1b]0;owned\x07\x9b", "\0", "\ud800", "\u202e", [], {},
    [[]], [None], {"": None}, "float32", "F64", "auto", "model.safetensors", ["self_attn.q_proj"] * 3,
]  # fmt: skip


def damaged(content: bytes, random: Random) -> bytes:
    """Change bytes: flips, cuts, insertions, repetitions."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(data))
        stop = min(len(data), start + random.choice([1, 1, 8, 64, 10_000]))
        match random.choice(["flip", "cut", "truncate", "insert", "replace", "splice"]):
            case "flip" if start < len(data):
                data[start] ^= 1 << random.randrange(8)
            case "cut":
                del data[start:stop]
            case "truncate":
                del data[start:]
            case "insert":
                data[start:start] = random.choice(_SNIPPETS)
            case "replace":
                data[start:stop] = random.choice(_SNIPPETS)
            case "splice":
                place = random.randint(0, len(data))
                data[place:place] = data[start:stop]
    return bytes(data)


def damaged_json(content: bytes, random: Random) -> bytes:
    """Change values, names and nesting of a JSON document."""
    document = json.loads(content)
    for _ in range(random.randint(1, 3)):
        document = _changed(document, random)
    return json.dumps(document).encode()


def _changed(document: Any, random: Random) -> Any:
    """Return the document with one of its places changed, each level as likely as the next."""
    if isinstance(document, dict | list) and document and random.random() < 0.8:
        key = random.choice(list(document) if isinstance(document, dict) else range(len(document)))
        match random.choice(["deeper", "deeper", "deeper", "deeper", "remove", "rename", "repeat"]):
            case "remove":
                del document[key]
            case "rename" if isinstance(document, dict):
                document[random.choice([*document, "", "\x1b[2J", "x"])] = document.pop(key)
            case "repeat" if isinstance(document, list):
                document.insert(key, deepcopy(document[key]))
            case _:
                document[key] = _changed(document[key], random)
        return document
    if isinstance(document, int) and random.random() < 0.5:
        return document + random.choice([-2, -1, 1, 2, 7])
    if random.random() < 0.1:
        return [document] if random.random() < 0.5 else {"a": document}
    return deepcopy(random.choice(_VALUES))


def damaged_header(content: bytes, random: Random) -> bytes:
    """Change the JSON header of a safetensors file, and keep its length right."""
    (length,) = struct.unpack("<Q", content[:8])
    header = damaged_json(content[8 : 8 + length], random)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]
