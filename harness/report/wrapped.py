"""A label, and beside it a text in lines: how terminals are told facts."""

import textwrap
from collections.abc import Iterator


def wrapped(label: str, text: str, width: int, *, indent: int = 14) -> Iterator[str]:
    """Yield lines of at most `width` columns; the text begins at column `indent`."""
    lines = textwrap.wrap(text, width - indent) or [""]
    yield f"{label:{indent}}{lines[0]}".rstrip()
    yield from (" " * indent + line for line in lines[1:])
