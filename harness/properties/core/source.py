"""Values as source text that a reader takes in at a glance."""

import re
from collections.abc import Sequence
from itertools import groupby

SHORT = 12
"""A list of so many elements is written out."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def spell(value: object) -> str:
    """Write a value as source text; long lists of few different tokens as sums: `[0] * 256 + [1]`."""
    if isinstance(value, list) and len(value) > SHORT and all(isinstance(element, int) for element in value):
        parts = _parts(value)
        if len(parts) <= SHORT:
            return " + ".join(parts)
    return repr(value)


def plain_text(value: object) -> str:
    """Return a text that is equal for equal values: sets are sorted, addresses are left out."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(plain_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain_text, value))}]"
    return _ADDRESS.sub("", repr(value))


def _parts(tokens: Sequence[int]) -> list[str]:
    parts: list[str] = []
    single: list[int] = []
    for token, run in groupby(tokens):
        length = len(list(run))
        if length < 4:
            single += [token] * length
            continue
        parts += [str(single)] if single else []
        parts.append(f"[{token}] * {length}")
        single = []
    return [*parts, str(single)] if single else parts
