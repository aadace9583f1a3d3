"""JSON that others wrote: what Python's own reader takes, but for nestings that would end whoever walks over them.

And the digest of a value by its JSON.
"""

import hashlib
import json
from typing import Any

MOST_NESTED = 100
"""Lists and objects within one another that are read: no config, trace or answer comes near it."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, has a number of more than 4,300 digits, or is nested deeper than `MOST_NESTED`.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise _too_deep() from None
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, brackets)) > MOST_NESTED:  # type: ignore[arg-type]
        _check_depth(value)
    return value


def json_digest(value: Any) -> str:
    """Return the sha256 of a value as JSON, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_NESTED):
        level = [member for own in level for member in _members(own) if isinstance(member, dict | list)]
        if not level:
            return
    raise _too_deep()


def _members(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested deeper than {MOST_NESTED} levels")
