"""One font for every machine: each character is the same box, half as wide as it is high.

A page's lines break where its font says, and machines have other fonts. A browser that has no font but this one lays a
page out alike everywhere.
"""

import struct
from pathlib import Path

EM, ADVANCE, ASCENT, DESCENT = 1000, 500, 800, 200
_BOX = (50, 0, 450, 500)
"""The glyph: left, bottom, right, top."""
_CONFIG = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}</dir><cachedir>{folder}/cache</cachedir></fontconfig>
"""


def write_fontconfig(folder: Path) -> Path:
    """Write the font and return a configuration of fontconfig that knows no other."""
    folder.mkdir(parents=True)
    (folder / "box.ttf").write_bytes(_font())
    config = folder / "fonts.conf"
    config.write_text(_CONFIG.format(folder=folder), encoding="utf-8")
    return config


def _font() -> bytes:
    """Return a TrueType font of two glyphs (OpenType 1.9): nothing, and the box."""
    glyph = _glyph()
    tables = {
        b"OS/2": _metrics_of_windows(),
        b"cmap": _characters(),
        b"glyf": glyph,
        b"head": struct.pack(">IIIIHHqqhhhhHHhhh", 0x10000, 0x10000, 0, 0x5F0F3CF5, 3, EM, 0, 0, *_BOX, 0, 8, 2, 1, 0),
        b"hhea": struct.pack(">IhhhHhhhhhhhhhhhH", 0x10000, ASCENT, -DESCENT, 0, ADVANCE, *[0] * 11, 2),
        b"hmtx": struct.pack(">HhHh", ADVANCE, 0, ADVANCE, _BOX[0]),
        b"loca": struct.pack(">III", 0, 0, len(glyph)),
        b"maxp": struct.pack(">IHHHHHHHHHHHHHH", 0x10000, 2, 4, 1, 0, 0, 1, *[0] * 8),
        b"name": _names(),
        b"post": struct.pack(">IIhhIIIII", 0x30000, 0, -100, 50, *[0] * 5),
    }
    offset, directory, contents = 12 + 16 * len(tables), b"", b""
    for tag, table in tables.items():
        padded = table + bytes(-len(table) % 4)
        checksum = sum(struct.unpack(f">{len(padded) // 4}I", padded)) % 2**32
        directory += struct.pack(">4sIII", tag, checksum, offset + len(contents), len(table))
        contents += padded
    return struct.pack(">IHHHH", 0x10000, len(tables), 128, 3, 16 * len(tables) - 128) + directory + contents


def _glyph() -> bytes:
    left, bottom, right, top = _BOX
    across, up = (left, 0, right - left, 0), (bottom, top - bottom, 0, bottom - top)
    return struct.pack(">hhhhhHH4B4h4hxx", 1, *_BOX, 3, 0, 1, 1, 1, 1, *across, *up)


def _characters() -> bytes:
    """All of Unicode is the box: a table of format 13."""
    return struct.pack(">HHHHIHHIIIIII", 0, 1, 3, 10, 12, 13, 0, 28, 0, 1, 0x20, 0x10FFFF, 1)


def _names() -> bytes:
    texts = [
        (number, text.encode("utf-16-be")) for number, text in ((1, "Box"), (2, "Regular"), (4, "Box"), (6, "Box"))
    ]
    records, strings = b"", b""
    for number, text in texts:
        records += struct.pack(">HHHHHH", 3, 1, 0x409, number, len(text), len(strings))
        strings += text
    return struct.pack(">HHH", 0, len(texts), 6 + len(records)) + records + strings


def _metrics_of_windows() -> bytes:
    widths = (ADVANCE, 400, 5, 0)
    lines = (ASCENT, -DESCENT, 0, ASCENT, DESCENT)
    return struct.pack(
        ">HhHHH10hh10s4I4sHHHhhhHHII",
        1,
        *widths,
        *[0] * 11,
        bytes(10),
        *[0] * 4,
        b"TEST",
        0x40,
        0x20,
        0xFFFF,
        *lines,
        1,
        0,
    )
